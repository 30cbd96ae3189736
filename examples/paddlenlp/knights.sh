#!/usr/bin/env bash
# Knights and knaves as in PaddleNLP's guide, end to end: puzzles become src/tgt rows, a server gives the rewards, and a
# file in PaddleNLP's words trains by GRPO or REINFORCE++.
#
#   examples/paddlenlp/knights.sh [grpo|reinforce_plus_plus] [more options of trimtab rl]
#   TINY=1 examples/paddlenlp/knights.sh
#
#   MODEL        what to train (Qwen/Qwen2.5-7B-Instruct-1M)
#   ROWS         puzzles to train on: a parquet or JSONL file, such as K-and-K's or Logic-RL's; unset: 900 made here
#   TEST_ROWS    puzzles to measure with, likewise
#   SAVE_PATH    where everything goes (./checkpoint/knights-METHOD)
#   REWARD_URL   a reward server that is there already; unset: one of ours, at port PORT (8731) while this runs

METHOD=grpo
case ${1:-} in grpo | reinforce_plus_plus)
    METHOD=$1
    shift
    ;;
esac
HERE=$(dirname "${BASH_SOURCE[0]}")
TINY_TASK=knights_task
source "$HERE/../common.sh"

MODEL=${MODEL:-Qwen/Qwen2.5-7B-Instruct-1M}
SAVE_PATH=${SAVE_PATH:-./checkpoint/knights-$METHOD}
PORT=${PORT:-8731}
SIZES=(--ckpt_path "$SAVE_PATH/checkpoints" --use_visualdl "$SAVE_PATH/vdl_log")
if tiny; then
    MODEL=$TASK/model ROWS=$TASK/train.jsonl TEST_ROWS=$TASK/test.jsonl SAVE_PATH=$TINY_FOLDER/knights-$METHOD PORT=0
    SIZES=(--ckpt_path "$SAVE_PATH/checkpoints" --use_visualdl None --prompt_max_len 128 --generate_min_len 0
        --generate_max_len 24 --temperature 1 --rollout_slots 64 --ds_tensor_parallel_size 1 --zero_stage 0 --bf16 False
        --micro_train_batch_size 64 --micro_logprob_batch_size 64 --micro_rollout_batch_size 64
        --gradient_checkpointing False --ref_reward_offload False --actor_learning_rate 5e-3 --max_steps 10
        --eval_steps -1 --eval_max_samples 8 --save_steps -1 --save_hf_ckpt False)
elif [[ -z ${ROWS:-} ]]; then
    [[ -e $SAVE_PATH/puzzles ]] || "$PYTHON" -m trimtab.embedded.knights_task "$SAVE_PATH/puzzles"
    ROWS=$SAVE_PATH/puzzles/train.jsonl TEST_ROWS=$SAVE_PATH/puzzles/test.jsonl
fi

for split in train test; do
    rows=$ROWS
    [[ $split == test ]] && rows=${TEST_ROWS:?puzzles to measure with}
    # Each time: they may be other rows than those of an earlier run.
    "$PYTHON" -m trimtab.cli.main kk-data "$rows" "$SAVE_PATH/data/$split.jsonl"
done

if [[ -z ${REWARD_URL:-} ]]; then
    # Its first line says where it listens, and then it does.
    exec {served}< <(exec "$PYTHON" -m trimtab.cli.serve_rm --reward_verifier kk --port "$PORT")
    SERVER=$!
    trap 'kill "$SERVER" 2>/dev/null || true' EXIT
    read -r line <&"$served"
    REWARD_URL=${line##* }
fi

choose_launcher
# shellcheck disable=SC2086 # LAUNCH is several words
$LAUNCH trimtab.cli.run_rl "$HERE/${METHOD}_argument.yaml" \
    --pretrain "$MODEL" \
    --remote_rm_url "$REWARD_URL" \
    --prompt_data "$SAVE_PATH/data/train.jsonl" \
    --eval_dataset "$SAVE_PATH/data/test.jsonl" \
    --save_path "$SAVE_PATH" \
    "${SIZES[@]}" ${MORE[@]+"${MORE[@]}"}
