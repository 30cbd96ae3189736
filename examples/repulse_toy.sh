#!/usr/bin/env bash
# RePULSe's toy experiment end to end: five methods, three seeds, equally many sampled answers; then curves of
# log P(bad), reward and return, the frontier of reward and P(bad), and a page with all of it. Minutes on two CPU cores.
#
#   examples/repulse_toy.sh [more options of trimtab tail]
#
#   OUT=./repulse_toy    where everything is written; what is there already is not trained again
#   SEEDS="1 2 3"   AT_ONCE=2 (runs at the same time)   FIT_STEPS=15 (points of a curve; each is 5,000 answers)

set -euo pipefail
PYTHON=${PYTHON:-python}
OUT=${OUT:-./repulse_toy} SEEDS=${SEEDS:-1 2 3} AT_ONCE=${AT_ONCE:-2} FIT_STEPS=${FIT_STEPS:-15}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
METHODS=(ppo reinforce reinforce_transform base_proposal repulse)
GROUP=250 # answers of an update

mkdir -p "$OUT/info"
[[ -e $OUT/task ]] || "$PYTHON" -m trimtab.embedded.bad_word_task "$OUT/task"

# RePULSe samples twice a group for an update, so it makes half as many.
settings() {
    case $1 in
    ppo) echo --num_episodes 20 --critic_learning_rate 1e-3 ;;
    reinforce) echo --num_episodes 20 ;;
    reinforce_transform) echo --num_episodes 20 --alpha 1 --target_dist_beta -1 ;;
    base_proposal) echo --num_episodes 20 --alpha 0.02 --push_down_scale per_group --target_dist_beta -10 ;;
    repulse) echo --num_episodes 10 --alpha 0.02 --push_down_scale per_group --target_dist_beta -10 ;;
    esac
}

train() {
    local method=$1 seed=$2 folder=$OUT/$1-$2
    shift 2
    [[ -e $folder/config.json ]] && return
    # shellcheck disable=SC2046 # settings are several words
    "$PYTHON" -m trimtab.cli.train_tail --method "$method" $(settings "$method") --seed "$seed" \
        --pretrain "$OUT/task/model" --prompt_data "$OUT/task/prompts.jsonl" --input_key prompt \
        --remote_rm_url "$OUT/task/reward.py" --bad_threshold 0 \
        --single_prompt word7 --analytic_bad_word_calc --bad_token_ids 2 3 4 5 --fit_steps "$FIT_STEPS" \
        --evaluate_heldout_sampling --heldout_prompt_data "$OUT/task/prompts.jsonl" --sampling_iters 20 \
        --generate_max_len 2 --rollout_batch_size 1 --n_samples_per_prompt $GROUP --train_batch_size $GROUP \
        --micro_train_batch_size $GROUP --micro_rollout_batch_size $GROUP --init_kl_coef 0 \
        --actor_learning_rate 2e-3 --proposal_learning_rate 6e-3 --save_rollouts 2 \
        --save_path "$folder" --ckpt_path "$folder/checkpoints" --save_info_path "$OUT/info/$method" "$@" \
        >"$folder.log" 2>&1 || { tail -3 "$folder.log" && return 1; }
    echo "$method, seed $seed: $(tail -1 "$folder/metrics.jsonl" | grep -o '"log_bad_probability": [^,}]*')"
}

running=0
one_ends() {
    wait -n || { echo "a run has failed: see above, and $OUT/*.log" >&2 && wait && exit 1; }
    running=$((running - 1))
}
for seed in $SEEDS; do
    for method in "${METHODS[@]}"; do
        ((running < AT_ONCE)) || one_ends
        train "$method" "$seed" "$@" &
        running=$((running + 1))
    done
done
while ((running > 0)); do one_ends; done

# A figure's manifest names the runs; a run is called by what it was trained with, and its seed comes last.
{
    printf 'info: info\nthreshold: 0\nlevel: 0.01\nmethods:\n'
    for method in "${METHODS[@]}"; do
        cp "$OUT/info/$method"/* "$OUT/info/"
        name=$(basename "$(echo "$OUT/info/$method"/analyticlogprob_rewsample_*_s"${SEEDS%% *}")")
        name=${name#analyticlogprob_rewsample_}
        printf -- '- {label: %s, run: "%s_s{seed}", seeds: [%s], samples: %d}\n' \
            "$method" "${name%_s*}" "${SEEDS// /, }" $((FIT_STEPS * 20 * GROUP))
    done
} >"$OUT/figures.yaml"
for figure in curves "frontier --x reward --y bad" page; do
    # shellcheck disable=SC2086 # a figure is several words
    set -- $figure
    "$PYTHON" -m trimtab.cli.main plot "$1" "$OUT/figures.yaml" "${@:2}"
done
