#!/usr/bin/env bash
# Reward model: Llama 3 8B learns which of two conversations people prefer.
#
#   examples/train_rm.sh [more options of trimtab rm]
#   TINY=1 examples/train_rm.sh

source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

MODEL=${MODEL:-OpenRLHF/Llama-3-8b-sft-mixture}
DATA=${DATA:-OpenRLHF/preference_dataset_mixture2_and_safe_pku}
SAVE_PATH=${SAVE_PATH:-./checkpoint/llama3-8b-rm}
if tiny; then MODEL=$TASK/llama DATA=$TASK/preferences.jsonl SAVE_PATH=$TINY_FOLDER/rm; fi

# The saved model loads with AutoModelForSequenceClassification: its head is called score.
start trimtab.cli.train_rm \
    --save_path "$SAVE_PATH" \
    --save_steps -1 \
    --logging_steps 1 \
    --eval_steps -1 \
    --train_batch_size 256 \
    --micro_train_batch_size 1 \
    --pretrain "$MODEL" \
    --bf16 \
    --max_epochs 1 \
    --max_len 8192 \
    --zero_stage 3 \
    --learning_rate 9e-6 \
    --dataset "$DATA" \
    --apply_chat_template \
    --chosen_key chosen \
    --rejected_key rejected \
    --value_head_prefix score \
    --flash_attn \
    --packing_samples \
    --gradient_checkpointing \
    --load_checkpoint
