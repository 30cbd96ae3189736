#!/usr/bin/env bash
# Supervised fine-tuning of Llama 3 70B: layers are cut over eight processes, and their parts split over the others.
#
#   PROCESSES=8 examples/train_sft_tensor.sh [more options of trimtab sft]
#   TINY=1 examples/train_sft_tensor.sh

source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

MODEL=${MODEL:-meta-llama/Meta-Llama-3-70B}
DATA=${DATA:-Open-Orca/OpenOrca}
SAVE_PATH=${SAVE_PATH:-./checkpoint/llama3-70b-sft}
TENSOR=${TENSOR:-8}
if tiny; then MODEL=$TASK/llama DATA=$TASK/questions.jsonl SAVE_PATH=$TINY_FOLDER/sft-tensor PROCESSES=${PROCESSES:-2} TENSOR=2; fi

# Still too large: --offload_activations. With more processes: without --adam_offload. `trimtab plan` compares layouts.
start trimtab.cli.train_sft \
    --max_len 2048 \
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
    --zero_stage 3 \
    --max_epochs 1 \
    --bf16 \
    --flash_attn \
    --learning_rate 5e-6 \
    --gradient_checkpointing \
    --packing_samples \
    --load_checkpoint \
    --adam_offload \
    --ds_tensor_parallel_size "$TENSOR"
