#!/usr/bin/env bash
# A shell (or a command) in the image of dockerfile/Dockerfile, with all GPUs. UNTESTED: it has not been run by its
# authors.
#
#   dockerfile/docker_run.sh
#   dockerfile/docker_run.sh trimtab sft --pretrain MODEL --dataset DATA --save_path ./my-model
#
# The current folder becomes /workspace, so results stay outside the container; downloads and tokenised data stay in
# your own cache folders.

set -euo pipefail

IMAGE=${IMAGE:-trimtab}
HUB_CACHE=${HF_HOME:-$HOME/.cache/huggingface}
TOKEN_CACHE=${TRIMTAB_CACHE:-$HOME/.cache/trimtab}
mkdir -p "$HUB_CACHE" "$TOKEN_CACHE"

TERMINAL=(-i)
if [[ -t 0 && -t 1 ]]; then TERMINAL=(-it); fi

# Processes of one run exchange batches through shared memory, of which a container has little by default.
# Without a value, -e passes a key on from this shell if it is set there.
exec docker run "${TERMINAL[@]}" --rm \
    --gpus all \
    --shm-size "${SHM_SIZE:-10g}" \
    --ulimit memlock=-1 \
    --user "$(id -u):$(id -g)" \
    -e HOME=/workspace \
    -e HF_HOME=/cache/huggingface \
    -e TRIMTAB_CACHE=/cache/trimtab \
    -e HF_TOKEN \
    -e WANDB_API_KEY \
    -v "$HUB_CACHE:/cache/huggingface" \
    -v "$TOKEN_CACHE:/cache/trimtab" \
    -v "$PWD:/workspace" \
    "$IMAGE" "${@:-bash}"
