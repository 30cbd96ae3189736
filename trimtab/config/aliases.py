"""Names from other projects: OpenRLHF, TRL, verl, prime-rl and others, one table for each.

An alias is accepted in place of an option: an exact synonym, unit included. Other words are no option here, or mean
another one; an error message says what leads to the same, and docs/words.md lists them. Files of PaddleNLP and commands
of RePULSe are read by paddlenlp_aliases.py and repulse_aliases.py.
"""

import functools
from collections.abc import Container
from dataclasses import dataclass

# A value without a mark is the option that the name stands for; `=` marks what means the same, value by value, and `~`
# what leads to the same. Of several, separated by |, the first one counts that the job has.
OPENRLHF = {
    "max_epoch": "max_epochs",
    "train_split": "dataset_split",
    "wandb": "use_wandb",
    "value_prefix_head": "value_head_prefix",
    "rollout_micro_batch_size": "micro_rollout_batch_size",
    "n_samples_per_prompts": "n_samples_per_prompt",
    "ds.param_dtype": "~ --bf16",
    "algo.advantage.is_correction_type": "~ --mismatch_correction",
    "algo.advantage.is_correction_threshold": "~ --mismatch_correction tis --mismatch_range 0.5 2",
}
TRL = {
    "model_name_or_path": "pretrain",
    "dataset_name": "prompt_data | dataset",
    "dataset_train_split": "prompt_split | dataset_split",
    "num_train_epochs": "num_episodes | max_epochs",
    "per_device_train_batch_size": "micro_train_batch_size",
    "warmup_ratio": "lr_warmup_ratio",
    "lr_scheduler_type": "lr_scheduler",
    "weight_decay": "l2",
    "max_grad_norm": "max_norm",
    "max_length": "max_len",
    "packing": "packing_samples",
    "lora_r": "lora_rank",
    "lora_target_modules": "target_modules",
    "output_dir": "save_path",
    "run_name": "wandb_run_name",
    "dataset_num_proc": "num_workers",
    "desirable_weight": "desirable_loss_weight",
    "undesirable_weight": "undesirable_loss_weight",
    "teacher_model_name_or_path": "teacher_model",
    "num_generations": "n_samples_per_prompt",
    "max_prompt_length": "prompt_max_len",
    "max_completion_length": "generate_max_len",
    "epsilon": "eps_clip",
    "reward_model_path": "reward_pretrain",
    "beta": "= --init_kl_coef",
    "kl_coef": "= --init_kl_coef",
    "learning_rate": "= --actor_learning_rate",
    "train_dataset": "= --prompt_data | --dataset",
    "dataset": "= --prompt_data",
    "args": "~ --config FILE.yaml",
    "processing_class": "~ --pretrain",
    "peft_config": "~ --lora_rank 16 --lora_alpha 32",
    "callbacks": "~ --use_wandb or --use_tensorboard FOLDER",
    "formatting_func": "~ --input_template",
    "model_init_kwargs": "~ --bf16 --attn_implementation",
    "reward_funcs": "~ --reward_func FILE.py or --reward_verifier NAME",
    "reward_model": "= --reward_pretrain",
    "value_model": "= --critic_pretrain",
    "response_length": "= --generate_max_len",
    "max_seq_length": "= --max_len",
    "use_vllm": "~ --rollout_engine vllm",
    "mask_truncated_completions": "= --mask_truncated",
    "use_peft": "~ --lora_rank 16",
    "load_in_8bit": "~ --load_in_4bit --bf16",
    "per_device_eval_batch_size": "~ --micro_train_batch_size",
    "generation_batch_size": "~ --rollout_batch_size",
    "num_iterations": "= --max_epochs",
    "num_ppo_epochs": "= --max_epochs",
    "epsilon_high": "~ --eps_clip_low_high 0.2 0.28",
    "cliprange": "= --eps_clip",
    "cliprange_value": "= --value_clip",
    "lam": "= --lambd",
    "scale_rewards": "~ --advantage_estimator dr_grpo",
    "importance_sampling_level": "~ --policy_loss_type gspo",
    "sft_model_path": "= --pretrain",
    "loss_type": "~ --preference_loss | --loss_reduction",
    "rpo_alpha": "= --nll_loss_coef",
    "ref_model": "= --ref_pretrain",
    "completion_only_loss": "~ --pretrain_mode False",
    "assistant_only_loss": "~ --multiturn",
    "dataset_text_field": "~ --input_key TEXT --pretrain_mode",
    "chat_template_path": "= --tokenizer_chat_template",
    "dataset_test_split": "= --eval_split",
    "resume_from_checkpoint": "~ --load_checkpoint",
    "save_total_limit": "= --max_ckpt_num",
    "eval_strategy": "~ --eval_steps",
    "save_strategy": "~ --save_steps",
    "report_to": "~ --use_wandb or --use_tensorboard FOLDER",
    "warmup_steps": "~ --lr_warmup_ratio",
    "adam_beta1": "~ --adam_betas 0.9 0.95",
    "max_staleness": "~ --async_train --async_staleness",
    "queue_maxsize": "~ --async_train --async_queue_size",
    "max_inflight_tasks": "~ --rollout_slots",
    "fp16": "~ --bf16",
    "torch_dtype": "~ --bf16",
    "dtype": "~ --bf16",
}
VERL = {
    "algorithm.adv_estimator": "~ --advantage_estimator",
    "algorithm.kl_ctrl.kl_coef": "= --init_kl_coef",
    "data.train_files": "= --prompt_data",
    "data.val_files": "= --eval_dataset",
    "data.train_batch_size": "= --rollout_batch_size",
    "data.max_prompt_length": "= --prompt_max_len",
    "data.max_response_length": "= --generate_max_len",
    "data.prompt_key": "= --input_key",
    "actor_rollout_ref.model.path": "= --pretrain",
    "actor_rollout_ref.actor.optim.lr": "= --actor_learning_rate",
    "actor_rollout_ref.actor.ppo_mini_batch_size": "~ --train_batch_size",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": "= --micro_train_batch_size",
    "actor_rollout_ref.actor.ppo_epochs": "= --max_epochs",
    "actor_rollout_ref.actor.clip_ratio": "= --eps_clip",
    "actor_rollout_ref.actor.use_kl_loss": "= --use_kl_loss",
    "actor_rollout_ref.actor.kl_loss_coef": "= --init_kl_coef",
    "actor_rollout_ref.rollout.n": "= --n_samples_per_prompt",
    "actor_rollout_ref.rollout.temperature": "= --temperature",
    "critic.optim.lr": "= --critic_learning_rate",
    "reward_model.model.path": "= --reward_pretrain",
    "reward.reward_model.model_path": "= --reward_pretrain",
    "custom_reward_function.path": "~ --reward_func FILE.py",
    "reward.custom_reward_function.path": "~ --reward_func FILE.py",
    "critic.model.path": "= --critic_pretrain",
    "algorithm.gamma": "= --gamma",
    "algorithm.lam": "= --lambd",
    "algorithm.use_kl_in_reward": "~ --use_kl_loss False",
    "algorithm.norm_adv_by_std_in_grpo": "~ --advantage_estimator dr_grpo",
    "algorithm.filter_groups.enable": "~ --dynamic_filtering",
    "actor_rollout_ref.actor.clip_ratio_low": "~ --eps_clip_low_high 0.2 0.28",
    "actor_rollout_ref.actor.clip_ratio_high": "~ --eps_clip_low_high 0.2 0.28",
    "actor_rollout_ref.actor.clip_ratio_c": "= --dual_clip",
    "actor_rollout_ref.actor.loss_agg_mode": "~ --loss_reduction",
    "actor_rollout_ref.actor.policy_loss.loss_mode": "~ --policy_loss_type",
    "actor_rollout_ref.actor.entropy_coeff": "= --entropy_loss_coef",
    "actor_rollout_ref.actor.kl_loss_type": "~ --kl_estimator",
    "actor_rollout_ref.actor.use_dynamic_bsz": "= --use_dynamic_batch",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": "= --train_max_tokens_per_gpu",
    "actor_rollout_ref.actor.grad_clip": "= --max_norm",
    "actor_rollout_ref.actor.ulysses_sequence_parallel_size": "~ --ring_attn_size",
    "actor_rollout_ref.model.lora_rank": "= --lora_rank",
    "actor_rollout_ref.model.lora_alpha": "= --lora_alpha",
    "actor_rollout_ref.model.enable_gradient_checkpointing": "= --gradient_checkpointing",
    "actor_rollout_ref.rollout.top_p": "= --top_p",
    "actor_rollout_ref.rollout.name": "~ --rollout_engine",
    "actor_rollout_ref.rollout.tensor_model_parallel_size": "= --vllm_tensor_parallel_size",
    "actor_rollout_ref.rollout.gpu_memory_utilization": "= --vllm_gpu_memory_utilization",
    "actor_rollout_ref.rollout.multi_turn.max_assistant_turns": "= --max_turns",
    "trainer.total_epochs": "= --num_episodes",
    "trainer.total_training_steps": "= --max_steps",
    "trainer.save_freq": "= --save_steps",
    "trainer.test_freq": "= --eval_steps",
    "trainer.default_local_dir": "= --ckpt_path",
    "trainer.n_gpus_per_node": "= --nproc",
    "trainer.nnodes": "~ --ray --actor_num_nodes",
    "trainer.logger": "~ --use_wandb or --use_tensorboard FOLDER",
    "trainer.resume_mode": "~ --load_checkpoint",
    "trainer.v1.sampler.max_off_policy_threshold": "~ --async_train --async_staleness",
    "async_training.staleness_threshold": "~ --async_train --async_staleness",
    "async_training.partial_rollout": "~ --async_train --partial_rollout",
}
PRIME_RL = {
    "model.name": "= --pretrain",
    "seq_len": "~ --prompt_max_len --generate_max_len",
    "orchestrator.batch_size": "= --train_batch_size",
    "orchestrator.group_size": "= --n_samples_per_prompt",
    "orchestrator.train.group_size": "= --n_samples_per_prompt",
    "rollouts_per_example": "= --n_samples_per_prompt",
    "orchestrator.train.sampling.max_completion_tokens": "= --generate_max_len",
    "orchestrator.train.sampling.temperature": "= --temperature",
    "trainer.optim.lr": "= --actor_learning_rate",
    "trainer.model.lora.rank": "= --lora_rank",
    "ckpt.interval": "= --save_steps",
    "wandb.project": "~ --use_wandb --wandb_project",
    "max_off_policy_steps": "~ --async_train --async_staleness",
    "orchestrator.max_off_policy_steps": "~ --async_train --async_staleness",
    "max_async_level": "~ --async_train --async_queue_size",
}
TABLES = {
    "TRL": TRL,
    "PyTorch": {"lr": "= --learning_rate | --actor_learning_rate"},
    "DeepSpeed": {"tp_size": "ds_tensor_parallel_size"},
    "OpenRLHF": OPENRLHF,
    "verl": VERL,
    "prime-rl": PRIME_RL,
    "AReaL": {
        "max_head_offpolicyness": "~ --async_train --async_staleness",
        "rollout.max_head_offpolicyness": "~ --async_train --async_staleness",
    },
    "SkyRL": {"trainer.fully_async.max_staleness_steps": "~ --async_train --async_staleness"},
    "NeMo-RL": {"grpo.async_grpo.max_trajectory_age_steps": "~ --async_train --async_staleness"},
}
IN_PYTHON = {
    "args": "its fields as arguments of the call",
    "processing_class": "tokenizer=",
    "callbacks": "on_iteration=",
    "reward_funcs": "reward=[FUNCTION, 'VERIFIER', ...]",
    "reward_model": "reward=",
}
"""What leads to the same in a call from Python, where that is not the option as an argument."""

# OpenRLHF's flags since April 2026 (0.10.2): owner.name. Most names are ours, alone or behind their owner's.
_DOTTED_SAME = {
    "actor": (
        "aux_loss_coef lr_scheduler lr_warmup_ratio min_lr_ratio max_norm eps_clip eps_clip_low_high "
        "dual_clip policy_loss_type"
    ),
    "model": "aux_loss_coef beta label_smoothing nll_loss_coef",
    "reward": "overlong_buffer_len overlong_penalty_factor",
    "critic": "value_clip save_value_network",
    "ds": (
        "zero_stage adam_offload zpg overlap_comm grad_accum_dtype deepcompile ring_attn_size "
        "attn_implementation use_liger_kernel load_in_4bit packing_samples value_head_prefix"
    ),
    "vllm": "enforce_eager enable_prefix_caching",
    "rollout": "temperature top_p n_samples_per_prompt vllm_generate_batch_size",
    "data": (
        "prompt_split dataset dataset_probs dataset_split input_key output_key label_key prompt_key "
        "chosen_key rejected_key input_template apply_chat_template tokenizer_chat_template max_len "
        "max_samples multiturn disable_fast_tokenizer"
    ),
    "train": (
        "max_epochs num_episodes seed async_queue_size enable_ema ema_beta agent_func_path "
        "colocate_actor_ref colocate_critic_reward"
    ),
    "ckpt": "save_steps",
    "logger": "logging_steps",
}
_DOTTED_PREFIXED = {
    "actor": "num_nodes num_gpus_per_node",
    "reward": "clip_range num_nodes num_gpus_per_node",
    "ref": "offload num_nodes num_gpus_per_node",
    "critic": "num_nodes num_gpus_per_node",
    "adam": "betas eps",
    "ds": "tensor_parallel_size",
    "vllm": "num_engines tensor_parallel_size sync_backend sync_with_ray gpu_memory_utilization enable_sleep",
    "rollout": "batch_size max_tokens_per_gpu",
    "train": "batch_size max_tokens_per_gpu",
    "eval": "dataset split steps temperature n_samples_per_prompt",
    "ckpt": "path",
}
DOTTED = {
    **{f"{owner}.{name}": name for owner, names in _DOTTED_SAME.items() for name in names.split()},
    **{f"{owner}.{name}": f"{owner}_{name}" for owner, names in _DOTTED_PREFIXED.items() for name in names.split()},
    "actor.model_name_or_path": "pretrain",
    "actor.gradient_checkpointing_enable": "gradient_checkpointing",
    "actor.gradient_checkpointing_reentrant": "gradient_checkpointing_use_reentrant",
    "actor.adam.lr": "actor_learning_rate",
    "actor.adam.betas": "adam_betas",
    "actor.adam.eps": "adam_eps",
    "actor.adam.weight_decay": "l2",
    "actor.entropy_coef": "entropy_loss_coef",
    "model.model_name_or_path": "pretrain",
    "model.gradient_checkpointing_enable": "gradient_checkpointing",
    "model.gradient_checkpointing_reentrant": "gradient_checkpointing_use_reentrant",
    "model.ipo_enable": "ipo",
    "model.compute_fp32_loss_enable": "compute_fp32_loss",
    "model.margin_loss_enable": "margin_loss",
    "model.loss_type": "loss",
    "model.pretrain_mode_enable": "pretrain_mode",
    "reward.model_name_or_path": "reward_pretrain",
    "reward.remote_url": "remote_rm_url",
    "reward.normalize_enable": "normalize_reward",
    "ref.model_name_or_path": "ref_pretrain",
    "critic.model_name_or_path": "critic_pretrain",
    "critic.adam.lr": "critic_learning_rate",
    "critic.freezing_steps": "freezing_actor_steps",
    "adam.lr": "learning_rate",
    "adam.weight_decay": "l2",
    "ds.enable_sleep": "deepspeed_enable_sleep",
    "ds.use_universal_ckpt": "use_ds_universal_ckpt",
    "ds.ring_attn_head_stride": "ring_head_stride",
    "ds.lora.rank": "lora_rank",
    "ds.lora.alpha": "lora_alpha",
    "ds.lora.dropout": "lora_dropout",
    "ds.lora.target_modules": "target_modules",
    "rollout.max_new_tokens": "generate_max_len",
    "rollout.micro_batch_size": "micro_rollout_batch_size",
    "data.prompt_dataset": "prompt_data",
    "data.prompt_probs": "prompt_data_probs",
    "train.micro_batch_size": "micro_train_batch_size",
    "train.full_determinism_enable": "full_determinism",
    "train.async_enable": "async_train",
    "train.partial_rollout_enable": "partial_rollout",
    "train.dynamic_batch_enable": "use_dynamic_batch",
    "train.colocate_all": "colocate_all_models",
    "ckpt.output_dir": "save_path",
    "ckpt.save_hf": "save_hf_ckpt",
    "ckpt.disable_ds": "disable_ds_ckpt",
    "ckpt.max_num": "max_ckpt_num",
    "ckpt.max_mem": "max_ckpt_mem",
    "ckpt.load_enable": "load_checkpoint",
    "logger.tensorboard_dir": "use_tensorboard",
    "logger.wandb.key": "use_wandb",
    "logger.wandb.org": "wandb_org",
    "logger.wandb.group": "wandb_group",
    "logger.wandb.project": "wandb_project",
    "logger.wandb.run_name": "wandb_run_name",
    "algo.advantage.estimator": "advantage_estimator",
    "algo.advantage.gamma": "gamma",
    "algo.advantage.lambd": "lambd",
    "algo.advantage.no_std_norm": "no_advantage_std_norm",
    "algo.advantage.is_correction_enable": "enable_vllm_is_correction",
    "algo.kl.init_coef": "init_kl_coef",
    "algo.kl.target": "kl_target",
    "algo.kl.horizon": "kl_horizon",
    "algo.kl.estimator": "kl_estimator",
    "algo.kl.use_loss": "use_kl_loss",
    "algo.dynamic_filtering_enable": "dynamic_filtering",
    "algo.dynamic_filtering_range": "dynamic_filtering_reward_range",
}

VERBS = {
    "train": "trimtab sft, dpo, grpo or another verb of trimtab --help",
    "finetune": "trimtab sft",
    "fine-tune": "trimtab sft",
    "reward": "trimtab rm",
    "orpo": "trimtab dpo --preference_loss orpo",
    "simpo": "trimtab dpo --preference_loss simpo",
    "ipo": "trimtab dpo --preference_loss ipo",
    "gkd": "trimtab kd, or trimtab grpo --teacher_model MODEL for the student's own answers",
    "dr_grpo": "trimtab grpo --advantage_estimator dr_grpo",
    "gspo": "trimtab grpo --policy_loss_type gspo",
    "cispo": "trimtab grpo --policy_loss_type cispo",
    "reinforce++": "trimtab reinforce",
    "online_dpo": "trimtab generate, then trimtab dpo: docs/generate.md shows the loop",
    "train_ppo_ray": "trimtab ppo --ray",
    "merge": "trimtab lora-combine",
    "vllm-serve": "trimtab serve",
    "eval": "trimtab generate",
    "evaluate": "trimtab generate",
    "inference": "trimtab generate",
}
"""Words in the place of a verb, and what is meant."""


@dataclass(frozen=True)
class Word:
    """A name that another tool has for options of ours."""

    tool: str
    word: str
    ours: str
    """The options that lead to the same, with values where they matter."""
    exact: bool
    """Ours means the same, value by value."""

    @property
    def options(self) -> list[str]:
        return [part.removeprefix("--") for part in self.ours.split() if part.startswith("--")]


WORDS = tuple(
    Word(tool, word, option, ours.startswith("="))
    for tool, table in TABLES.items()
    for word, ours in table.items()
    if ours.startswith(("=", "~"))
    for option in ours[2:].split(" | ")
)
ALIASES = {
    name: ours.split(" | ")
    for table in (*TABLES.values(), DOTTED)
    for name, ours in table.items()
    if not ours.startswith(("=", "~"))
}
"""The options that each accepted name stands for."""


def meant(name: str, known: Container[str]) -> str:
    """The option that `name` stands for in a job with these options."""
    if name in known or name not in ALIASES:
        return name
    return next((option for option in ALIASES[name] if option in known), ALIASES[name][-1])


def aliases_of(name: str, known: Container[str]) -> tuple[str, ...]:
    """The other names of an option in a job with these options."""
    return tuple(alias for alias in _names_of(name) if meant(alias, known) == name)


@functools.cache
def _names_of(option: str) -> list[str]:
    return [alias for alias, options in ALIASES.items() if option in options]


def advice(word: str, known: Container[str], *, in_python: bool = False) -> str | None:
    """One clause about another tool's word, in a job that has the options `known`; None: no tool calls anything so."""
    found = [entry for entry in WORDS if entry.word == word]
    fitting = next((entry for entry in found if all(name in known for name in entry.options)), None)
    if fitting is not None:
        ours = IN_PYTHON.get(word, fitting.ours) if in_python else fitting.ours
        return f"{fitting.tool}'s {word} {'is' if fitting.exact else 'becomes'} {ours} here"
    if found:
        return f"{found[0].tool}'s {word} has no counterpart in this job ({found[0].ours} is an option of others)"
    return None


def dotted() -> str:
    """The table of docs/from_openrlhf.md: OpenRLHF's flags since April 2026, those of one owner together."""
    owners: dict[str, list[str]] = {}
    for theirs, ours in DOTTED.items():
        owner, _, name = theirs.partition(".")
        same = f"`{name}`" if name == ours else f"`{name}` (`--{ours}`)"
        owners.setdefault(owner, []).append(same)
    rows = [f"| `--{owner}.` | {', '.join(names)} |" for owner, names in owners.items()]
    return "\n".join(["| before the name | the name, and ours where it is another |", "|---|---|", *rows]) + "\n"


def page() -> str:
    """docs/words.md."""
    lines = [
        "# Options of other tools",
        "",
        "What leads to the same here; ≈ where the value or its unit is another. Error messages name unknown options",
        "from this table. OpenRLHF's options and many of TRL's are accepted as they are: `--help all` shows them as",
        "`also --NAME`. For a command translated and different defaults: [TRL](from_trl.md),",
        "[OpenRLHF](from_openrlhf.md), [verl](from_verl.md), [prime-rl](from_prime_rl.md).",
    ]
    for tool in dict.fromkeys(word.tool for word in WORDS):
        rows: dict[str, list[str]] = {}
        for word in WORDS:
            if word.tool == tool:
                rows.setdefault(f"{'' if word.exact else '≈ '}`{word.ours}`", []).append(f"`{word.word}`")
        lines += ["", f"## {tool}", "", "| theirs | here |", "|---|---|"]
        lines += [f"| {', '.join(names)} | {ours} |" for ours, names in rows.items()]
    verbs: dict[str, list[str]] = {}
    for verb, meant in VERBS.items():
        verbs.setdefault(meant, []).append(f"`{verb}`")
    lines += ["", "## Commands", "", "| in place of a verb | here |", "|---|---|"]
    lines += [f"| {', '.join(names)} | {meant} |" for meant, names in verbs.items()]
    return "\n".join(lines) + "\n"
