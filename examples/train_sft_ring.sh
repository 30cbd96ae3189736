#!/usr/bin/env bash
# Supervised fine-tuning on long rows: each is split over two processes, whose attention gathers keys and values.
#
#   PROCESSES=8 examples/train_sft_ring.sh [more options of trimtab sft]
#   TINY=1 examples/train_sft_ring.sh

source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

MODEL=${MODEL:-meta-llama/Meta-Llama-3-8B}
DATA=${DATA:-Open-Orca/OpenOrca}
SAVE_PATH=${SAVE_PATH:-./checkpoint/llama3-8b-sft-ring}
if tiny; then MODEL=$TASK/llama DATA=$TASK/questions.jsonl SAVE_PATH=$TINY_FOLDER/sft-ring PROCESSES=${PROCESSES:-2}; fi

# Longer rows: a larger --ring_attn_size, or --offload_activations. Less memory in attention: --ring_head_stride 1.
start trimtab.cli.train_sft \
    --max_len 32768 \
    --dataset "$DATA" \
    --input_key question \
    --output_key response \
    --input_template $'User: {}\nAssistant: ' \
    --train_batch_size 256 \
    --micro_train_batch_size 1 \
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
    --load_checkpoint \
    --ring_attn_size 2 \
    --ring_head_stride 2
