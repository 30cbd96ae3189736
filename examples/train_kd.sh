#!/usr/bin/env bash
# Distillation: Llama 3.2 1B learns from OpenOrca's answers and from what a larger Llama thinks of every token of them.
#
#   examples/train_kd.sh [more options of trimtab kd]
#   TINY=1 examples/train_kd.sh

source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

MODEL=${MODEL:-meta-llama/Llama-3.2-1B-Instruct}
TEACHER=${TEACHER:-meta-llama/Llama-3.1-8B-Instruct} # it must have the student's vocabulary
DATA=${DATA:-Open-Orca/OpenOrca}
SAVE_PATH=${SAVE_PATH:-./checkpoint/llama3.2-1b-kd}
if tiny; then MODEL=$TASK/llama TEACHER=$TASK/teacher DATA=$TASK/questions.jsonl SAVE_PATH=$TINY_FOLDER/kd; fi

# Other distances: --kd_loss reverse_kl or jsd. Less memory: --teacher_offload.
start trimtab.cli.train_kd \
    --max_len 2048 \
    --dataset "$DATA" \
    --input_key question \
    --output_key response \
    --apply_chat_template \
    --train_batch_size 256 \
    --micro_train_batch_size 2 \
    --max_samples 500000 \
    --pretrain "$MODEL" \
    --teacher_model "$TEACHER" \
    --kd_coef 0.4 \
    --save_path "$SAVE_PATH" \
    --save_steps -1 \
    --logging_steps 1 \
    --eval_steps -1 \
    --zero_stage 2 \
    --max_epochs 1 \
    --bf16 \
    --flash_attn \
    --packing_samples \
    --learning_rate 5e-6 \
    --gradient_checkpointing
