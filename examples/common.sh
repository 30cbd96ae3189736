# Read by every recipe: how its command is started, and the tiny mode. It does nothing by itself.
#
#   PROCESSES=8   processes to start; unset: one for each NVIDIA GPU, at least one
#   LAUNCH=...    what starts the command instead, for instance LAUNCH="deepspeed --module" or LAUNCH="python -m"
#   TINY=1        embedded models and a few rows, to see the recipe work: seconds, no network, no accelerator
#   TINY_FOLDER   where the tiny mode writes (./tiny)

set -euo pipefail

PYTHON=${PYTHON:-python}
MORE=("$@") # the user's own options, which come last and win

tiny() { [[ ${TINY:-0} == 1 ]]; }

if tiny; then
    TINY_FOLDER=${TINY_FOLDER:-./tiny}
    # A recipe with a task of its own names it before it reads this file.
    TASK=$TINY_FOLDER/${TINY_TASK:-task}
    # Options that are too large for the tiny models and their few rows.
    SMALL=(--max_len 64 --train_batch_size 8 --micro_train_batch_size 4 --learning_rate 1e-2)
    SMALL_RL=(--prompt_max_len 64 --generate_max_len 12 --rollout_batch_size 8 --train_batch_size 8
        --micro_train_batch_size 4 --actor_learning_rate 1e-2)
    # On Ray: two processes that share everything, and the built-in engine.
    SMALL_RAY=(--prompt_max_len 64 --generate_max_len 12 --rollout_batch_size 8 --train_batch_size 8
        --actor_learning_rate 1e-2 --max_samples 16 --vllm_num_engines 0 --vllm_tensor_parallel_size 1 --actor_num_nodes 1
        --actor_num_gpus_per_node 2 --ref_num_nodes 1 --ref_num_gpus_per_node 2 --critic_num_nodes 1
        --critic_num_gpus_per_node 2 --reward_num_nodes 1 --reward_num_gpus_per_node 2)
    [[ -e $TASK ]] || "$PYTHON" -m "trimtab.embedded.${TINY_TASK:-tiny_recipes}" "$TASK"
fi

processes() {
    local found
    found=$(nvidia-smi --list-gpus 2>/dev/null | wc -l || true)
    tiny && found=1
    echo "${PROCESSES:-$((found > 1 ? found : 1))}"
}

choose_launcher() {
    local count
    count=$(processes)
    if [[ -z ${LAUNCH:-} ]]; then
        LAUNCH="$PYTHON -m"
        ((count > 1)) && LAUNCH="torchrun --standalone --nproc_per_node $count -m"
    fi
    return 0
}

# step RESULT MODULE OPTION ...: one command of a recipe that has several, unless its result is there already. So a
# recipe that was stopped goes on where it was.
step() {
    local result=$1
    shift
    [[ -e $result ]] && return
    choose_launcher
    # shellcheck disable=SC2086 # LAUNCH is several words
    $LAUNCH "$@"
}

# start MODULE OPTION ...: run the recipe.
start() {
    choose_launcher
    tiny && set -- "$@" "${SMALL[@]}" --ckpt_path "$SAVE_PATH/checkpoints"
    # shellcheck disable=SC2086 # LAUNCH is several words
    exec $LAUNCH "$@" ${MORE[@]+"${MORE[@]}"}
}

# submit MODULE OPTION ...: run the recipe on Ray. With LAUNCH, and in the tiny mode, the command is run here: it joins
# the Ray in RAY_ADDRESS, or starts one that only this machine reaches. Else it goes to the cluster's head:
#
#   RAY_AUTH_TOKEN_PATH   the cluster's token, a file that only you read (~/.ray/auth_token)
#   RAY_HEAD              where its head takes jobs (http://127.0.0.1:8265)
#   STOP_SECONDS          what `ray job stop` gives the run to save (600)
submit() {
    export RAY_AUTH_MODE=token
    tiny && set -- "$@" "${SMALL[@]}" --ckpt_path "$SAVE_PATH/checkpoints"
    if tiny || [[ -n ${LAUNCH:-} ]]; then
        # shellcheck disable=SC2086 # LAUNCH is several words
        exec ${LAUNCH:-$PYTHON -m} "$@" ${MORE[@]+"${MORE[@]}"}
    fi
    export RAY_AUTH_TOKEN_PATH=${RAY_AUTH_TOKEN_PATH:-$HOME/.ray/auth_token}
    [[ -s $RAY_AUTH_TOKEN_PATH ]] || { echo "no token in RAY_AUTH_TOKEN_PATH ($RAY_AUTH_TOKEN_PATH)" >&2; exit 2; }
    exec ray job submit --address "${RAY_HEAD:-http://127.0.0.1:8265}" \
        --runtime-env-json "{\"env_vars\": {\"RAY_JOB_STOP_WAIT_TIME_S\": \"${STOP_SECONDS:-600}\"}}" \
        -- python3 -m "$@" ${MORE[@]+"${MORE[@]}"}
}
