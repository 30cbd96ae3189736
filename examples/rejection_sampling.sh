#!/usr/bin/env bash
# Rejection sampling: the model answers each prompt several times, a reward model chooses the best answer, the model is
# fine-tuned on these; and again, on the next prompts.
#
#   examples/rejection_sampling.sh
#   TINY=1 examples/rejection_sampling.sh
#
#   MODEL, REWARD, PROMPTS, INPUT_KEY, SAVE_PATH, ROUNDS   what to use instead

source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

MODEL=${MODEL:-OpenRLHF/Llama-3-8b-sft-mixture}
REWARD=${REWARD:-OpenRLHF/Llama-3-8b-rm-mixture}
PROMPTS=${PROMPTS:-OpenRLHF/prompt-collection-v0.1}
INPUT_KEY=${INPUT_KEY:-context_messages}
SAVE_PATH=${SAVE_PATH:-./checkpoint/llama3-8b-rejection}
ROUNDS=${ROUNDS:-5}
GENERATE=(--prompt_max_len 2048 --max_new_tokens 2048 --rollout_batch_size 10240 --bf16)
SCORE=(--max_len 4096 --micro_batch_size 4 --bf16)
TRAIN=(--max_len 4096 --train_batch_size 128 --micro_train_batch_size 2 --learning_rate 2e-6 --bf16 --zero_stage 2
    --gradient_checkpointing --packing_samples)
if tiny; then
    MODEL=$TASK/llama PROMPTS=$TASK/questions.jsonl INPUT_KEY=question SAVE_PATH=$TINY_FOLDER/rejection ROUNDS=2
    REWARD=$TINY_FOLDER/rejection-reward
    GENERATE=(--max_new_tokens 8 --rollout_batch_size 16)
    SCORE=(--max_len 64)
    TRAIN=("${SMALL[@]}")
    step "$REWARD/config.json" trimtab.cli.train_rm --pretrain "$MODEL" --dataset "$TASK/preferences.jsonl" \
        --save_path "$REWARD" --ckpt_path "$REWARD/checkpoints" "${SMALL[@]}"
fi

for ((round = 0; round < ROUNDS; round++)); do
    step "$SAVE_PATH/answers-$round.jsonl" trimtab.cli.batch_inference \
        --eval_task generate \
        --pretrain "$MODEL" \
        --dataset "$PROMPTS" \
        --input_key "$INPUT_KEY" \
        --apply_chat_template \
        --iter "$round" \
        --best_of_n 4 \
        --temperature 0.9 \
        --output_path "$SAVE_PATH/answers-$round.jsonl" \
        "${GENERATE[@]}"
    step "$SAVE_PATH/best-$round.jsonl" trimtab.cli.batch_inference \
        --eval_task rm \
        --pretrain "$REWARD" \
        --dataset "$SAVE_PATH/answers-$round.jsonl" \
        --post_processor rs \
        --output_path "$SAVE_PATH/best-$round.jsonl" \
        "${SCORE[@]}"
    step "$SAVE_PATH/round-$round/config.json" trimtab.cli.train_sft \
        --pretrain "$MODEL" \
        --dataset "$SAVE_PATH/best-$round.jsonl" \
        --input_key input \
        --output_key output \
        --max_epochs 1 \
        --save_path "$SAVE_PATH/round-$round" \
        --ckpt_path "$SAVE_PATH/checkpoints-$round" \
        "${TRAIN[@]}"
    MODEL=$SAVE_PATH/round-$round
done
