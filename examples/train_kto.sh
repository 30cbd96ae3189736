#!/usr/bin/env bash
# Kahneman-Tversky optimisation: Llama 3 8B learns from single answers that were judged good or bad.
#
#   examples/train_kto.sh [more options of trimtab kto]
#   TINY=1 examples/train_kto.sh

source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

MODEL=${MODEL:-OpenRLHF/Llama-3-8b-sft-mixture}
DATA=${DATA:-Dylan2048/ultrafeedback-unpaired-preferences}
SAVE_PATH=${SAVE_PATH:-./checkpoint/llama3-8b-kto}
if tiny; then MODEL=$TASK/llama DATA=$TASK/judged_answers.jsonl SAVE_PATH=$TINY_FOLDER/kto; fi

# Many more answers of one kind than of the other: --desirable_loss_weight, --undesirable_loss_weight.
start trimtab.cli.train_kto \
    --save_path "$SAVE_PATH" \
    --save_steps -1 \
    --logging_steps 1 \
    --eval_steps -1 \
    --train_batch_size 64 \
    --micro_train_batch_size 1 \
    --pretrain "$MODEL" \
    --bf16 \
    --max_epochs 1 \
    --max_len 8192 \
    --zero_stage 3 \
    --learning_rate 5e-7 \
    --dataset "$DATA" \
    --input_key instruction \
    --output_key response \
    --label_key score \
    --flash_attn \
    --beta 0.1 \
    --gradient_checkpointing
