# What the recipes of environments have in common, read by each of them; see ../common.sh for PROCESSES, LAUNCH and TINY.

source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

MODEL=${MODEL:-Qwen/Qwen2.5-1.5B-Instruct}
tiny && MODEL=$TASK/agent
tiny && SMALL=(--prompt_max_len 640 --generate_max_len 8 --episode_max_len 1024 --max_turns 3 --max_samples 16
    --rollout_batch_size 4 --n_samples_per_prompt 4 --train_batch_size 16 --actor_learning_rate 1e-3 --zero_stage 0
    --bf16 False --env_workers 1)

# train OPTION ...: GRPO on what the environment gives.
train() {
    start trimtab.cli.train_grpo \
        --pretrain "$MODEL" \
        --save_path "$SAVE_PATH" \
        --apply_chat_template \
        --save_steps -1 \
        --rollout_batch_size 64 \
        --n_samples_per_prompt 8 \
        --train_batch_size 256 \
        --use_dynamic_batch \
        --max_samples 20000 \
        --prompt_max_len 1024 \
        --generate_max_len 1024 \
        --episode_max_len 8192 \
        --zero_stage 3 \
        --bf16 \
        --actor_learning_rate 1e-6 \
        --init_kl_coef 0 \
        --eps_clip_low_high 0.2 0.28 \
        "$@"
}
