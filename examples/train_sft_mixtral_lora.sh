#!/usr/bin/env bash
# Supervised fine-tuning with LoRA of a mixture of experts: Mixtral 8x7B, its routers kept in balance.
#
#   examples/train_sft_mixtral_lora.sh [more options of trimtab sft]
#   TINY=1 examples/train_sft_mixtral_lora.sh
#
# What is saved is the adapter. Merged into its model:
#   trimtab lora-combine --model_path mistralai/Mixtral-8x7B-v0.1 --lora_path ./checkpoint/mixtral-sft-lora \
#       --output_path ./checkpoint/mixtral-sft --bf16

source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

MODEL=${MODEL:-mistralai/Mixtral-8x7B-v0.1}
DATA=${DATA:-Open-Orca/OpenOrca}
SAVE_PATH=${SAVE_PATH:-./checkpoint/mixtral-sft-lora}
if tiny; then MODEL=$TASK/mixtral DATA=$TASK/questions.jsonl SAVE_PATH=$TINY_FOLDER/mixtral; fi

# On fewer accelerators: --load_in_4bit (with the qlora extra).
start trimtab.cli.train_sft \
    --max_len 2048 \
    --dataset "$DATA" \
    --input_key question \
    --output_key response \
    --input_template $'User: {}\nAssistant: ' \
    --train_batch_size 128 \
    --micro_train_batch_size 4 \
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
    --lora_rank 64 \
    --lora_alpha 64 \
    --target_modules q_proj k_proj v_proj o_proj \
    --aux_loss_coef 0.001
