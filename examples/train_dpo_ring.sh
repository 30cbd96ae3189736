#!/usr/bin/env bash
# Preference optimisation on long pairs: each row is split over two processes, for the policy and its reference.
#
#   PROCESSES=8 examples/train_dpo_ring.sh [more options of trimtab dpo]
#   TINY=1 examples/train_dpo_ring.sh

source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

MODEL=${MODEL:-OpenRLHF/Llama-3-8b-sft-mixture}
DATA=${DATA:-OpenRLHF/preference_dataset_mixture2_and_safe_pku}
SAVE_PATH=${SAVE_PATH:-./checkpoint/llama3-8b-dpo-ring}
if tiny; then MODEL=$TASK/llama DATA=$TASK/preferences.jsonl SAVE_PATH=$TINY_FOLDER/dpo-ring PROCESSES=${PROCESSES:-2}; fi

# Less memory: --ref_offload, or --precompute_ref_log_probs; more processes for a row: --ring_attn_size 4.
start trimtab.cli.train_dpo \
    --save_path "$SAVE_PATH" \
    --save_steps -1 \
    --logging_steps 1 \
    --eval_steps -1 \
    --train_batch_size 256 \
    --micro_train_batch_size 1 \
    --pretrain "$MODEL" \
    --bf16 \
    --max_epochs 1 \
    --max_len 16384 \
    --zero_stage 3 \
    --learning_rate 5e-7 \
    --dataset "$DATA" \
    --apply_chat_template \
    --chosen_key chosen \
    --rejected_key rejected \
    --flash_attn \
    --packing_samples \
    --load_checkpoint \
    --gradient_checkpointing \
    --beta 0.1 \
    --ring_attn_size 2 \
    --ring_head_stride 2
