#!/usr/bin/env bash
# GRPO with a reward function of one's own (reward_func.py): mathematics with known answers.
#
#   examples/train_grpo.sh [more options of trimtab grpo]
#   TINY=1 examples/train_grpo.sh

source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

MODEL=${MODEL:-Qwen/Qwen2.5-1.5B-Instruct}
DATA=${DATA:-agentica-org/DeepScaleR-Preview-Dataset}
REWARD_FUNCTION=${REWARD_FUNCTION:-$(dirname "${BASH_SOURCE[0]}")/reward_func.py}
SAVE_PATH=${SAVE_PATH:-./checkpoint/qwen2.5-1.5b-grpo}
if tiny; then
    MODEL=$TASK/llama DATA=$TASK/prompts.jsonl SAVE_PATH=$TINY_FOLDER/grpo
    SMALL=("${SMALL_RL[@]}")
fi

# Skip groups whose answers are all right or all wrong: --dynamic_filtering. Without a reference: --init_kl_coef 0.
start trimtab.cli.train_grpo \
    --pretrain "$MODEL" \
    --remote_rm_url "$REWARD_FUNCTION" \
    --save_path "$SAVE_PATH" \
    --save_steps -1 \
    --rollout_batch_size 128 \
    --n_samples_per_prompt 8 \
    --train_batch_size 256 \
    --use_dynamic_batch \
    --max_epochs 1 \
    --max_samples 100000 \
    --prompt_max_len 1024 \
    --generate_max_len 2048 \
    --zero_stage 3 \
    --bf16 \
    --actor_learning_rate 1e-6 \
    --init_kl_coef 1e-3 \
    --use_kl_loss \
    --kl_estimator k3 \
    --eps_clip_low_high 0.2 0.28 \
    --prompt_data "$DATA" \
    --input_key problem \
    --label_key answer \
    --apply_chat_template \
    --load_checkpoint \
    --gradient_checkpointing
