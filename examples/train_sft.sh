#!/usr/bin/env bash
# Supervised fine-tuning: Llama 3 8B learns to answer from OpenOrca.
#
#   examples/train_sft.sh [more options of trimtab sft]
#   TINY=1 examples/train_sft.sh

source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

MODEL=${MODEL:-meta-llama/Meta-Llama-3-8B}
DATA=${DATA:-Open-Orca/OpenOrca}
SAVE_PATH=${SAVE_PATH:-./checkpoint/llama3-8b-sft}
if tiny; then MODEL=$TASK/llama DATA=$TASK/questions.jsonl SAVE_PATH=$TINY_FOLDER/sft; fi

# Chat data: --apply_chat_template (and --multiturn). Continued pre-training: --pretrain_mode. Curves: --use_wandb True.
start trimtab.cli.train_sft \
    --max_len 4096 \
    --dataset "$DATA" \
    --input_key question \
    --output_key response \
    --input_template $'User: {}\nAssistant: ' \
    --train_batch_size 256 \
    --micro_train_batch_size 2 \
    --max_samples 500000 \
    --pretrain "$MODEL" \
    --save_path "$SAVE_PATH" \
    --save_steps -1 \
    --logging_steps 1 \
    --eval_steps -1 \
    --zero_stage 2 \
    --max_epochs 1 \
    --bf16 \
    --flash_attn \
    --learning_rate 5e-6 \
    --gradient_checkpointing \
    --packing_samples \
    --load_checkpoint
