#!/usr/bin/env bash
# Preference optimisation without a reward model: Llama 3 8B learns from pairs of conversations.
#
#   examples/train_dpo.sh [dpo|ipo|cdpo|orpo|simpo] [more options of trimtab dpo]
#   TINY=1 examples/train_dpo.sh

VARIANT=dpo
case ${1:-} in
dpo | ipo | cdpo | orpo | simpo) VARIANT=$1 && shift ;;
esac

source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

MODEL=${MODEL:-OpenRLHF/Llama-3-8b-sft-mixture}
DATA=${DATA:-OpenRLHF/preference_dataset_mixture2_and_safe_pku}
SAVE_PATH=${SAVE_PATH:-./checkpoint/llama3-8b-$VARIANT}
if tiny; then MODEL=$TASK/llama DATA=$TASK/preferences.jsonl SAVE_PATH=$TINY_FOLDER/$VARIANT; fi

case $VARIANT in
dpo) LOSS=(--beta 0.1) ;;
ipo) LOSS=(--beta 0.1 --ipo) ;;
cdpo) LOSS=(--beta 0.1 --label_smoothing 0.1) ;;
orpo) LOSS=(--beta 0.1 --preference_loss orpo) ;;
simpo) LOSS=(--beta 2 --preference_loss simpo --simpo_gamma 1) ;;
esac

# Less memory: --ref_offload, or --precompute_ref_log_probs. Closer to the chosen answers: --nll_loss_coef 0.2.
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
    --max_len 8192 \
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
    "${LOSS[@]}"
