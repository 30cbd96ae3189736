#!/usr/bin/env bash
# PPO with a reward model: Llama 3 8B answers prompts, and a critic that starts as a copy of the reward model learns
# with it.
#
#   examples/train_ppo.sh [more options of trimtab ppo]
#   TINY=1 examples/train_ppo.sh
#
# Rewards from a server instead (examples/serve_rm.sh): REWARD_URL=http://127.0.0.1:5000/get_reward

source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

MODEL=${MODEL:-OpenRLHF/Llama-3-8b-sft-mixture}
REWARD_MODEL=${REWARD_MODEL:-OpenRLHF/Llama-3-8b-rm-700k}
DATA=${DATA:-OpenRLHF/prompt-collection-v0.1}
SAVE_PATH=${SAVE_PATH:-./checkpoint/llama3-8b-ppo}
if tiny; then
    MODEL=$TASK/llama REWARD_MODEL=$TASK/reward DATA=$TASK/prompts.jsonl SAVE_PATH=$TINY_FOLDER/ppo
    SMALL=("${SMALL_RL[@]}")
fi
REWARD=(--reward_pretrain "$REWARD_MODEL" --normalize_reward)
if [[ -n ${REWARD_URL:-} ]]; then REWARD=(--remote_rm_url "$REWARD_URL" --critic_pretrain "$REWARD_MODEL"); fi

start trimtab.cli.train_ppo \
    --pretrain "$MODEL" \
    "${REWARD[@]}" \
    --save_path "$SAVE_PATH" \
    --save_steps -1 \
    --rollout_batch_size 1024 \
    --micro_rollout_batch_size 16 \
    --n_samples_per_prompt 1 \
    --train_batch_size 128 \
    --micro_train_batch_size 8 \
    --max_epochs 1 \
    --max_samples 100000 \
    --prompt_max_len 1024 \
    --generate_max_len 1024 \
    --zero_stage 3 \
    --bf16 \
    --actor_learning_rate 5e-7 \
    --critic_learning_rate 9e-6 \
    --init_kl_coef 0.01 \
    --prompt_data "$DATA" \
    --input_key context_messages \
    --apply_chat_template \
    --load_checkpoint \
    --gradient_checkpointing
