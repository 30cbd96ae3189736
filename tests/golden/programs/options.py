"""Writes every option of every verb, and what commands and files of other projects resolve to, with their exit codes.

Messages go to the log alone: their wording may change.
"""

import dataclasses
import importlib
import json
import os
import shlex
from pathlib import Path

from trimtab.errors import UserError


def module(*names: str):
    """The first of these modules that there is: BASE's or the working tree's."""
    return next(importlib.import_module(f"trimtab.config.{name}") for name in names if found(name))


def found(name: str) -> bool:
    return importlib.util.find_spec(f"trimtab.config.{name}") is not None


JOBS = importlib.import_module("trimtab.config.jobs").JOBS
options_of = module("catalogue", "option").options_of
common_options, parse = module("help", "parser").common_options, module("parse", "parser").parse
settled_and_checked = module("checks", "resolved_config").settled_and_checked
repulse = module("repulse_spelling", "repulse_aliases")

PAIRS = "--pretrain owner/model --dataset owner/data --chosen_key chosen --rejected_key rejected --apply_chat_template"
OFTEN = """--pretrain owner/policy --prompt_data owner/prompts --input_key context_messages --apply_chat_template
    --zero_stage 3 --bf16 --max_epochs 1 --max_samples 100000 --gradient_checkpointing"""
JUDGED = f"{OFTEN} --reward_pretrain owner/judge --normalize_reward"
HYBRID = """--colocate_all_models --vllm_num_engines 4 --vllm_tensor_parallel_size 2 --vllm_gpu_memory_utilization 0.5
    --vllm_enable_sleep --deepspeed_enable_sleep --actor_num_nodes 1 --actor_num_gpus_per_node 8 --packing_samples"""
DOTTED = """--actor.model_name_or_path owner/policy --data.prompt_dataset owner/prompts --reward.remote_url http://a/b
    --actor.adam.lr 5e-7 --algo.advantage.estimator rloo --rollout.n_samples_per_prompt 4 --ds.zero_stage 2"""
REPULSE = """--pretrain distilgpt2 --reward_pretrain owner/judge --prompt_data owner/prompts --save_path /runs --seed 1
    --ckpt_path /runs --save_info_path /info --micro_train_batch_size 250 --train_batch_size 250 --rm_type rlhf
    --micro_rollout_batch_size 50 --rollout_batch_size 50 --duplicate_rollout_batch_by 5 --generate_max_len 20
    --init_kl_coef 0.2 --save_negdata --lr_scheduler constant --n_samples_per_prompt 1"""
PAIR = """--do_harmlessness_training --parameterization policy_psi_q_p_s_t --actor_loss_type ctl --num_episodes 1
    --target_dist_beta -10 --alpha 0.1 --base_actor_learning_rate 1e-5 --actor_learning_rate 3e-5
    --harmlessness_training_num_episodes 4 --save_steps_harmless 100 --critic_learning_rate 0"""
COMMANDS = [
    f"dpo {PAIRS} --train_batch_size 32 --micro_train_batch_size 2 --learning_rate 1e-7 --beta 0.1 --ipo --ref_offload",
    f"dpo {PAIRS} --ipo --preference_loss simpo",
    f"rm {PAIRS} --packing_samples --value_prefix_head score --flash_attn --max_epoch 1",
    "prm --pretrain a/b --dataset c/d --label_key value --placeholder_token ки --reward_tokens + - --load_checkpoint",
    "kto --model_name_or_path a/b --dataset_name c/d --desirable_weight 2 --num_train_epochs 3 --weight_decay 0.1",
    "sft --model_name_or_path a/b --dataset_name c/d --per_device_train_batch_size 4 --gradient_accumulation_steps 8",
    "sft --pretrain a/b --dataset c/d --max_len 0",
    "sft --pretrain a/b --dataset c/d --tp_size 2 --max-len=4096 --wandb key --l2 None",
    "kd --pretrain a/b --dataset c/d --teacher_model_name_or_path e/f --lr_scheduler_type cosine --warmup_ratio 0.1",
    "generate --pretrain a/b --dataset c/d --best_of_n 4 --post_processor rs --reward_func f.py --output_path o",
    "generate --eval_task rm --pretrain a/b --dataset c/d --post_processor csft --normalize_reward --output_path o",
    "chat --pretrain a/b --enable_csft --csft_prompt good --temperature 0.5",
    "lora-combine --model_path a/b --lora_path c/d --output_path merged --is_rm --bf16",
    "serve-rm --reward_pretrain a/b --normalize_reward --port 80 --max_len 100 --batch_size 4 --packing_samples",
    f"ppo {JUDGED} {HYBRID} --micro_rollout_batch_size 16 --critic_learning_rate 9e-6 --use_wandb token",
    f"ppo {JUDGED} {HYBRID} --ray",
    f"ppo {JUDGED} --ref_num_nodes 2",
    f"ppo {OFTEN} --remote_rm_url http://user:pass@a:5000/b?token=c,http://a/b --rollout_micro_batch_size 16",
    f"ppo {JUDGED} --advantage_estimator group_norm --use_kl_loss --kl_estimator k3 --n_samples_per_prompts 4",
    f"grpo {JUDGED} --advantage_estimator dr_grpo --num_generations 4 --epsilon 0.1 --max_completion_length 64",
    f"grpo {JUDGED} --async_train --async_queue_size 2 --partial_rollout",
    f"grpo {JUDGED} --n_samples_per_prompt 1",
    f"dapo {JUDGED} --dynamic_filtering_reward_range 0.01 0.99 --overlong_buffer_len 200 --use_dynamic_batch",
    f"grpo {DOTTED}",
    f"grpo {DOTTED} --ds.param_dtype bf16",
    "grpo actor_rollout_ref.rollout.n=5",
    f"grpo {JUDGED} --learning_rat 1",
    f"tail {JUDGED} --method ppo",
    f"repulse {REPULSE} {PAIR} --harmlessness_training_loss_type neg_training",
    f"repulse {REPULSE} {PAIR} --harmlessness_training_loss_type neg_training --use_base_as_proposal --start_alpha 1",
    f"repulse {REPULSE} {PAIR} --harmlessness_training_loss_type reinforce --reward_transform minus_alpha_exp_beta_r",
    f"repulse {REPULSE} --parameterization policy --actor_loss_type ppo --num_episodes 4 --new_custom_single_prompt",
    f"repulse {REPULSE} {PAIR} --harmlessness_training_loss_type neg_training --rm_type exp",
    *(f"rl --config {name}" for name in ("least.yaml", "many.yaml", "ppo.yaml", "bad.yaml", "ours.yaml", "full.json")),
    "rl --config many.yaml --reward_verifier gsm8k --rollout_batch_size 32",
    "grpo --config least.yaml",
    "grpo --config ours.yaml",
]
LEAST = {"rl_algorithm": "grpo", "actor_model_name_or_path": "a/b", "train_datasets": "c/d", "report_to": "none"}
LEAST |= {"use_rm_server": True, "reward_server": "http://127.0.0.1:8731", "rollout_n": 4}
MANY = LEAST | {"sharding": "stage2 offload", "tensor_parallel_degree": 2, "max_steps": 100, "warmup_steps": 10}
MANY |= {"dynamic_sampling": True, "recompute": True, "recompute_granularity": "full_attn", "FLAGS_x": 1, "bf16": True}
MANY |= {
    "offload_level": "freeze_model optimizer",
    "clip_range_ratio_high": 0.3,
    "do_eval": True,
    "eval_datasets": "e/f",
}
MANY |= {"global_mini_batch_size": 4, "update_iters": 2, "evaluation_strategy": "steps", "balance_batch": False}
PPO = LEAST | {"rl_algorithm": "ppo", "use_rm_server": False, "reward_model_name_or_path": "g/h", "learning_rate": 1e-5}
PPO |= {
    "min_learning_rate": 1e-6,
    "lr_scheduler_type": "cosine",
    "critic_learning_rate": 2e-5,
    "normalize_reward": True,
}
FILES = {
    **{"least.yaml": LEAST, "many.yaml": MANY, "ppo.yaml": PPO, "bad.yaml": LEAST | {"pipeline_parallel_degree": 2}},
    "ours.yaml": {"pretrain": "a/b", "prompt_data": "c/d", "advantage_estimator": "rloo", "reward_verifier": "gsm8k"},
    "full.json": PPO | {"ptx_coeff": 1, "quant_type": "weight_only_int8", "save_strategy": "no", "run_name": "r"},
}


def described(option, common: bool) -> dict:
    shape = {
        "kind": option.kind.__name__,
        "count": option.count,
        "optional": option.optional,
        "default": option.default,
    }
    shape |= {"aliases": sorted({*option.aliases} - {option.name}), "limits": dataclasses.asdict(option.limits)}
    return shape | {"section": option.section, "common": common}


def resolved(command: str) -> dict:
    verb, *words = shlex.split(command)
    try:
        if verb == "repulse":
            assert repulse.is_repulse(words)
            verb, words = "tail", repulse.in_words_of_tail(words)
        options, warnings = settled_and_checked(parse(JOBS[verb], words))
    except UserError as error:
        print(f"{command}: {error}")
        return {"command": command, "exit code": 2}
    print(f"{command}: {[*getattr(options, 'notes', ()), *warnings]}")
    values = {name: getattr(options, name) for name in options_of(JOBS[verb]) if name != "wandb_run_name"}
    return {"command": command, "exit code": 0, "given": sorted(options.given), "options": values}


for name, values in FILES.items():
    Path(name).write_text("\n".join(f"{key}: {json.dumps(value)}" for key, value in values.items()))
Path("f.py").write_text("def reward_func(queries, prompts, labels): ...")
os.environ.pop("WORLD_SIZE", None)
verbs = {
    verb: {name: described(option, name in common_options(job)) for name, option in options_of(job).items()}
    for verb, job in JOBS.items()
}
Path("verbs.json").write_text(json.dumps(verbs, indent=1))
Path("commands.jsonl").write_text("".join(json.dumps(resolved(command)) + "\n" for command in COMMANDS))
