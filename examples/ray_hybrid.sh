#!/usr/bin/env bash
# PPO of Llama 3 8B with everything on the same 8 GPUs (hybrid engine): engines and models take turns, and what waits makes
# room for what works. `trimtab plan ppo --pretrain 8B --reward_pretrain 8B --nodes 1 --gpus 8 --on A100-80G --bf16
# --zero_stage 3 --gradient_checkpointing` says what fits.
#
#   examples/ray_hybrid.sh [more options of trimtab ppo]
#   TINY=1 examples/ray_hybrid.sh
#
# On a cluster (docs/cluster.md): make a token once, copy it to every machine, and start a Ray there:
#
#   (umask 077; mkdir -p ~/.ray; openssl rand -hex 32 > ~/.ray/auth_token)
#   RAY_AUTH_MODE=token ray start --head --node-ip-address ADDRESS --num-gpus 8        # on the first machine
#   RAY_AUTH_MODE=token ray start --address ADDRESS:6379 --num-gpus 8                  # on the others
#
# Paths must be the same on all machines. Ctrl-C ends the reading along, `ray job stop` the run, which saves.

source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

MODEL=${MODEL:-OpenRLHF/Llama-3-8b-sft-mixture}
REWARD_MODEL=${REWARD_MODEL:-OpenRLHF/Llama-3-8b-rm-700k}
DATA=${DATA:-OpenRLHF/prompt-collection-v0.1}
SAVE_PATH=${SAVE_PATH:-$PWD/checkpoint/llama3-8b-hybrid}
if tiny; then
    MODEL=$TASK/llama REWARD_MODEL=$TASK/reward DATA=$TASK/prompts.jsonl SAVE_PATH=$TINY_FOLDER/ray-hybrid
    SMALL=("${SMALL_RAY[@]}")
fi

submit trimtab.cli.train_ppo_ray \
    --actor_num_nodes 1 --actor_num_gpus_per_node 8 \
    --ref_num_nodes 1 --ref_num_gpus_per_node 8 \
    --critic_num_nodes 1 --critic_num_gpus_per_node 8 \
    --reward_num_nodes 1 --reward_num_gpus_per_node 8 \
    --vllm_num_engines 8 --vllm_tensor_parallel_size 1 \
    --colocate_all_models \
    --vllm_gpu_memory_utilization 0.5 \
    --vllm_enable_sleep \
    --deepspeed_enable_sleep \
    --pretrain "$MODEL" \
    --reward_pretrain "$REWARD_MODEL" \
    --normalize_reward \
    --save_path "$SAVE_PATH" \
    --save_steps 20 \
    --n_samples_per_prompt 1 \
    --max_epochs 1 \
    --max_samples 100000 \
    --prompt_max_len 1024 \
    --generate_max_len 1024 \
    --rollout_batch_size 1024 \
    --train_batch_size 128 \
    --use_dynamic_batch \
    --zero_stage 3 \
    --bf16 \
    --actor_learning_rate 5e-7 \
    --critic_learning_rate 9e-6 \
    --init_kl_coef 0.01 \
    --prompt_data "$DATA" \
    --input_key context_messages \
    --apply_chat_template \
    --load_checkpoint \
    --gradient_checkpointing
