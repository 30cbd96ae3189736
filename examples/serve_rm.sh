#!/usr/bin/env bash
# A reward model as a server, for recipes with REWARD_URL=http://127.0.0.1:5000/get_reward. It runs until Ctrl-C.
#
#   examples/serve_rm.sh [more options of trimtab serve-rm]
#   TINY=1 examples/serve_rm.sh

source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

REWARD_MODEL=${REWARD_MODEL:-OpenRLHF/Llama-3-8b-rm-700k}
PRECISION=(--bf16)
if tiny; then REWARD_MODEL=$TASK/reward PRECISION=(); fi

exec "$PYTHON" -m trimtab.cli.serve_rm \
    --reward_pretrain "$REWARD_MODEL" \
    --normalize_reward \
    --max_len 2048 \
    --port 5000 \
    ${PRECISION[@]+"${PRECISION[@]}"} \
    ${MORE[@]+"${MORE[@]}"}
