#!/usr/bin/env bash
# PPO of Llama 3 8B with rewards from a server (examples/serve_rm.sh), on GPUs of its own or of another cluster. Every
# machine of the engines must reach it.
#
#   REWARD_URL=http://ADDRESS:5000/get_reward
#
#   examples/ray_remote_reward.sh [more options of trimtab ppo]
#   TINY=1 examples/ray_remote_reward.sh
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
SAVE_PATH=${SAVE_PATH:-$PWD/checkpoint/llama3-8b-remote-reward}
if tiny; then
    MODEL=$TASK/llama REWARD_MODEL=$TASK/reward DATA=$TASK/prompts.jsonl SAVE_PATH=$TINY_FOLDER/ray-remote-reward
    SMALL=("${SMALL_RAY[@]}")
fi
REWARD_URL=${REWARD_URL:-http://127.0.0.1:5000/get_reward}

submit trimtab.cli.train_ppo_ray \
    --actor_num_nodes 1 --actor_num_gpus_per_node 2 \
    --ref_num_nodes 1 --ref_num_gpus_per_node 2 \
    --critic_num_nodes 1 --critic_num_gpus_per_node 2 \
    --vllm_num_engines 4 --vllm_tensor_parallel_size 1 \
    --colocate_actor_ref \
    --adam_offload \
    --pretrain "$MODEL" \
    --critic_pretrain "$REWARD_MODEL" \
    --remote_rm_url "$REWARD_URL" \
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
