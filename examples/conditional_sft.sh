#!/usr/bin/env bash
# Conditional SFT: a reward model scores answers, the model learns every one of them behind a prompt that names its
# score, and is then asked for a high one.
#
#   examples/conditional_sft.sh
#   TINY=1 examples/conditional_sft.sh
#
#   MODEL, REWARD, DATA, SAVE_PATH   what to use instead

source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

MODEL=${MODEL:-OpenRLHF/Llama-3-8b-sft-mixture}
REWARD=${REWARD:-OpenRLHF/Llama-3-8b-rm-mixture}
DATA=${DATA:-Open-Orca/OpenOrca}
SAVE_PATH=${SAVE_PATH:-./checkpoint/llama3-8b-csft}
SCORE=(--max_len 2048 --micro_batch_size 4 --max_samples 128000 --bf16)
TRAIN=(--max_len 2048 --train_batch_size 128 --micro_train_batch_size 2 --learning_rate 5e-6 --bf16 --zero_stage 2
    --gradient_checkpointing --packing_samples)
ASK=(--max_new_tokens 2048 --max_samples 1000 --bf16)
if tiny; then
    MODEL=$TASK/llama DATA=$TASK/questions.jsonl SAVE_PATH=$TINY_FOLDER/conditional
    REWARD=$TINY_FOLDER/conditional-reward
    SCORE=(--max_len 64)
    TRAIN=("${SMALL[@]}")
    ASK=(--max_new_tokens 8 --max_samples 4)
    step "$REWARD/config.json" trimtab.cli.train_rm --pretrain "$MODEL" --dataset "$TASK/preferences.jsonl" \
        --save_path "$REWARD" --ckpt_path "$REWARD/checkpoints" "${SMALL[@]}"
fi

# The rewards are told as deviations from their mean, so 2.00 below means: better than nearly all.
step "$SAVE_PATH/scored.jsonl" trimtab.cli.batch_inference \
    --eval_task rm \
    --pretrain "$REWARD" \
    --dataset "$DATA" \
    --input_key question \
    --output_key response \
    --apply_chat_template \
    --post_processor csft \
    --normalize_reward \
    --output_path "$SAVE_PATH/scored.jsonl" \
    "${SCORE[@]}"
step "$SAVE_PATH/model/config.json" trimtab.cli.train_sft \
    --pretrain "$MODEL" \
    --dataset "$SAVE_PATH/scored.jsonl" \
    --input_key input \
    --output_key output \
    --max_epochs 1 \
    --save_path "$SAVE_PATH/model" \
    --ckpt_path "$SAVE_PATH/checkpoints" \
    "${TRAIN[@]}"
step "$SAVE_PATH/answers.jsonl" trimtab.cli.batch_inference \
    --eval_task generate \
    --pretrain "$SAVE_PATH/model" \
    --dataset "$DATA" \
    --input_key question \
    --apply_chat_template \
    --enable_csft \
    --csft_prompt "<rm_score>: 2.00" \
    --output_path "$SAVE_PATH/answers.jsonl" \
    "${ASK[@]}"
