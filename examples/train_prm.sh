#!/usr/bin/env bash
# Process reward model: Mistral 7B learns to judge every step of a solution, from Math-Shepherd.
#
#   examples/train_prm.sh [more options of trimtab prm]
#   TINY=1 examples/train_prm.sh

source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

MODEL=${MODEL:-mistralai/Mistral-7B-v0.1}
DATA=${DATA:-zhuzilin/Math-Shepherd}
SAVE_PATH=${SAVE_PATH:-./checkpoint/mistral-7b-prm}
if tiny; then MODEL=$TASK/llama DATA=$TASK/judged_steps.jsonl SAVE_PATH=$TINY_FOLDER/prm; fi

start trimtab.cli.train_prm \
    --save_path "$SAVE_PATH" \
    --save_steps 500 \
    --logging_steps 1 \
    --eval_steps 100 \
    --train_batch_size 256 \
    --micro_train_batch_size 8 \
    --pretrain "$MODEL" \
    --bf16 \
    --max_epochs 1 \
    --max_len 8192 \
    --zero_stage 3 \
    --learning_rate 1e-6 \
    --dataset "$DATA" \
    --input_key input \
    --label_key value \
    --flash_attn \
    --load_checkpoint \
    --gradient_checkpointing \
    --packing_samples \
    --placeholder_token ки \
    --reward_tokens + -
