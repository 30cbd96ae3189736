#!/usr/bin/env bash
# REINFORCE++ with a reward model, or with a reward function of one's own: RL without a critic.
#
#   examples/train_reinforce.sh [more options of trimtab reinforce]
#   TINY=1 examples/train_reinforce.sh
#
# Mathematics with known answers and a function as the reward: REWARD_FUNCTION=examples/reward_func.py

source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

MODEL=${MODEL:-OpenRLHF/Llama-3-8b-sft-mixture}
REWARD_MODEL=${REWARD_MODEL:-OpenRLHF/Llama-3-8b-rm-700k}
if tiny; then
    MODEL=$TASK/llama REWARD_MODEL=$TASK/reward DATA=$TASK/prompts.jsonl
    SMALL=("${SMALL_RL[@]}")
fi
if [[ -n ${REWARD_FUNCTION:-} ]]; then
    NAME=reinforce-function
    DATA=${DATA:-agentica-org/DeepScaleR-Preview-Dataset}
    SOURCE=(--remote_rm_url "$REWARD_FUNCTION" --input_key problem --label_key answer)
else
    NAME=reinforce
    DATA=${DATA:-OpenRLHF/prompt-collection-v0.1}
    SOURCE=(--reward_pretrain "$REWARD_MODEL" --normalize_reward --input_key context_messages)
fi
SAVE_PATH=${SAVE_PATH:-./checkpoint/llama3-8b-$NAME}
if tiny; then SAVE_PATH=$TINY_FOLDER/$NAME; fi

# Baselines from other answers to the same prompt: --n_samples_per_prompt 4 with --advantage_estimator rloo or
# reinforce_baseline. The KL as a loss: --use_kl_loss --kl_estimator k3.
start trimtab.cli.train_reinforce \
    --pretrain "$MODEL" \
    "${SOURCE[@]}" \
    --save_path "$SAVE_PATH" \
    --save_steps -1 \
    --rollout_batch_size 1024 \
    --micro_rollout_batch_size 8 \
    --n_samples_per_prompt 1 \
    --train_batch_size 128 \
    --micro_train_batch_size 2 \
    --max_epochs 1 \
    --max_samples 100000 \
    --prompt_max_len 1024 \
    --generate_max_len 1024 \
    --zero_stage 3 \
    --bf16 \
    --adam_offload \
    --actor_learning_rate 5e-7 \
    --init_kl_coef 1e-4 \
    --prompt_data "$DATA" \
    --apply_chat_template \
    --load_checkpoint \
    --gradient_checkpointing
