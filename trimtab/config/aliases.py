"""Names from other projects: OpenRLHF, TRL, verl, prime-rl and others.

An alias is an exact synonym of an option, unit included, and is accepted in its place. Words that are no option
here, or mean another one, get an error message that says what leads to the same; docs/words.md lists them.
"""

from collections.abc import Container
from dataclasses import dataclass

ALIASES: dict[str, str] = {
    # OpenRLHF's documents
    "max_epoch": "max_epochs",
    "train_split": "dataset_split",
    "wandb": "use_wandb",
    "value_prefix_head": "value_head_prefix",
    "rollout_micro_batch_size": "micro_rollout_batch_size",
    "n_samples_per_prompts": "n_samples_per_prompt",
    # other launchers
    "tp_size": "ds_tensor_parallel_size",
    # TRL and transformers
    "model_name_or_path": "pretrain",
    "dataset_name": "dataset",
    "dataset_train_split": "dataset_split",
    "num_train_epochs": "max_epochs",
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
}

DOTTED: dict[str, str] = {
    "actor.model_name_or_path": "pretrain",
    "actor.gradient_checkpointing_enable": "gradient_checkpointing",
    "actor.gradient_checkpointing_reentrant": "gradient_checkpointing_use_reentrant",
    "actor.aux_loss_coef": "aux_loss_coef",
    "actor.adam.lr": "actor_learning_rate",
    "actor.adam.betas": "adam_betas",
    "actor.adam.eps": "adam_eps",
    "actor.adam.weight_decay": "l2",
    "actor.lr_scheduler": "lr_scheduler",
    "actor.lr_warmup_ratio": "lr_warmup_ratio",
    "actor.min_lr_ratio": "min_lr_ratio",
    "actor.max_norm": "max_norm",
    "actor.eps_clip": "eps_clip",
    "actor.eps_clip_low_high": "eps_clip_low_high",
    "actor.dual_clip": "dual_clip",
    "actor.policy_loss_type": "policy_loss_type",
    "actor.entropy_coef": "entropy_loss_coef",
    "actor.num_nodes": "actor_num_nodes",
    "actor.num_gpus_per_node": "actor_num_gpus_per_node",
    "model.model_name_or_path": "pretrain",
    "model.gradient_checkpointing_enable": "gradient_checkpointing",
    "model.gradient_checkpointing_reentrant": "gradient_checkpointing_use_reentrant",
    "model.aux_loss_coef": "aux_loss_coef",
    "model.beta": "beta",
    "model.ipo_enable": "ipo",
    "model.label_smoothing": "label_smoothing",
    "model.nll_loss_coef": "nll_loss_coef",
    "model.compute_fp32_loss_enable": "compute_fp32_loss",
    "model.margin_loss_enable": "margin_loss",
    "model.loss_type": "loss",
    "model.pretrain_mode_enable": "pretrain_mode",
    "reward.model_name_or_path": "reward_pretrain",
    "reward.remote_url": "remote_rm_url",
    "reward.normalize_enable": "normalize_reward",
    "reward.clip_range": "reward_clip_range",
    "reward.overlong_buffer_len": "overlong_buffer_len",
    "reward.overlong_penalty_factor": "overlong_penalty_factor",
    "reward.num_nodes": "reward_num_nodes",
    "reward.num_gpus_per_node": "reward_num_gpus_per_node",
    "ref.model_name_or_path": "ref_pretrain",
    "ref.offload": "ref_offload",
    "ref.num_nodes": "ref_num_nodes",
    "ref.num_gpus_per_node": "ref_num_gpus_per_node",
    "critic.model_name_or_path": "critic_pretrain",
    "critic.adam.lr": "critic_learning_rate",
    "critic.freezing_steps": "freezing_actor_steps",
    "critic.value_clip": "value_clip",
    "critic.save_value_network": "save_value_network",
    "critic.num_nodes": "critic_num_nodes",
    "critic.num_gpus_per_node": "critic_num_gpus_per_node",
    "adam.lr": "learning_rate",
    "adam.betas": "adam_betas",
    "adam.eps": "adam_eps",
    "adam.weight_decay": "l2",
    "ds.zero_stage": "zero_stage",
    "ds.adam_offload": "adam_offload",
    "ds.zpg": "zpg",
    "ds.overlap_comm": "overlap_comm",
    "ds.grad_accum_dtype": "grad_accum_dtype",
    "ds.deepcompile": "deepcompile",
    "ds.enable_sleep": "deepspeed_enable_sleep",
    "ds.use_universal_ckpt": "use_ds_universal_ckpt",
    "ds.tensor_parallel_size": "ds_tensor_parallel_size",
    "ds.ring_attn_size": "ring_attn_size",
    "ds.ring_attn_head_stride": "ring_head_stride",
    "ds.attn_implementation": "attn_implementation",
    "ds.use_liger_kernel": "use_liger_kernel",
    "ds.load_in_4bit": "load_in_4bit",
    "ds.lora.rank": "lora_rank",
    "ds.lora.alpha": "lora_alpha",
    "ds.lora.dropout": "lora_dropout",
    "ds.lora.target_modules": "target_modules",
    "ds.packing_samples": "packing_samples",
    "ds.value_head_prefix": "value_head_prefix",
    "vllm.num_engines": "vllm_num_engines",
    "vllm.tensor_parallel_size": "vllm_tensor_parallel_size",
    "vllm.sync_backend": "vllm_sync_backend",
    "vllm.sync_with_ray": "vllm_sync_with_ray",
    "vllm.gpu_memory_utilization": "vllm_gpu_memory_utilization",
    "vllm.enforce_eager": "enforce_eager",
    "vllm.enable_prefix_caching": "enable_prefix_caching",
    "vllm.enable_sleep": "vllm_enable_sleep",
    "rollout.temperature": "temperature",
    "rollout.top_p": "top_p",
    "rollout.max_new_tokens": "generate_max_len",
    "rollout.batch_size": "rollout_batch_size",
    "rollout.micro_batch_size": "micro_rollout_batch_size",
    "rollout.n_samples_per_prompt": "n_samples_per_prompt",
    "rollout.vllm_generate_batch_size": "vllm_generate_batch_size",
    "rollout.max_tokens_per_gpu": "rollout_max_tokens_per_gpu",
    "data.prompt_dataset": "prompt_data",
    "data.prompt_probs": "prompt_data_probs",
    "data.prompt_split": "prompt_split",
    "data.dataset": "dataset",
    "data.dataset_probs": "dataset_probs",
    "data.dataset_split": "dataset_split",
    "data.input_key": "input_key",
    "data.output_key": "output_key",
    "data.label_key": "label_key",
    "data.prompt_key": "prompt_key",
    "data.chosen_key": "chosen_key",
    "data.rejected_key": "rejected_key",
    "data.input_template": "input_template",
    "data.apply_chat_template": "apply_chat_template",
    "data.tokenizer_chat_template": "tokenizer_chat_template",
    "data.max_len": "max_len",
    "data.max_samples": "max_samples",
    "data.multiturn": "multiturn",
    "data.disable_fast_tokenizer": "disable_fast_tokenizer",
    "train.batch_size": "train_batch_size",
    "train.micro_batch_size": "micro_train_batch_size",
    "train.max_tokens_per_gpu": "train_max_tokens_per_gpu",
    "train.max_epochs": "max_epochs",
    "train.num_episodes": "num_episodes",
    "train.seed": "seed",
    "train.full_determinism_enable": "full_determinism",
    "train.async_enable": "async_train",
    "train.async_queue_size": "async_queue_size",
    "train.partial_rollout_enable": "partial_rollout",
    "train.dynamic_batch_enable": "use_dynamic_batch",
    "train.enable_ema": "enable_ema",
    "train.ema_beta": "ema_beta",
    "train.agent_func_path": "agent_func_path",
    "train.colocate_actor_ref": "colocate_actor_ref",
    "train.colocate_critic_reward": "colocate_critic_reward",
    "train.colocate_all": "colocate_all_models",
    "eval.dataset": "eval_dataset",
    "eval.split": "eval_split",
    "eval.steps": "eval_steps",
    "eval.temperature": "eval_temperature",
    "eval.n_samples_per_prompt": "eval_n_samples_per_prompt",
    "ckpt.output_dir": "save_path",
    "ckpt.path": "ckpt_path",
    "ckpt.save_steps": "save_steps",
    "ckpt.save_hf": "save_hf_ckpt",
    "ckpt.disable_ds": "disable_ds_ckpt",
    "ckpt.max_num": "max_ckpt_num",
    "ckpt.max_mem": "max_ckpt_mem",
    "ckpt.load_enable": "load_checkpoint",
    "logger.logging_steps": "logging_steps",
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
"""What OpenRLHF calls the same options since April 2026 (0.10.2): who owns one, then its name."""

IN_RL: dict[str, str] = {
    "dataset_name": "prompt_data",
    "dataset_train_split": "prompt_split",
    "num_train_epochs": "num_episodes",
}
"""Names that mean another option where the job has that one."""


def meant(name: str, known: Container[str]) -> str:
    """The option that `name` stands for in a job with these options."""
    if name in known:
        return name
    return IN_RL[name] if IN_RL.get(name) in known else ALIASES.get(name) or DOTTED.get(name, name)


def aliases_of(name: str, known: Container[str]) -> tuple[str, ...]:
    """The other names of an option in a job with these options."""
    return tuple(alias for alias in (*ALIASES, *DOTTED) if meant(alias, known) == name)


# ---- words that an error message explains


@dataclass(frozen=True)
class Word:
    tool: str
    word: str
    ours: str
    """The options that lead to the same, with values where they matter."""
    exact: bool = False
    """Ours means the same, value by value."""
    in_python: str | None = None
    """What leads to the same in a call from Python, if that is not `ours` as an argument."""

    @property
    def options(self) -> list[str]:
        return [part.removeprefix("--") for part in self.ours.split() if part.startswith("--")]


WORDS = (
    # TRL and transformers
    Word("TRL", "beta", "--init_kl_coef", exact=True),  # its GRPO's; DPO and KTO have --beta themselves
    Word("TRL", "kl_coef", "--init_kl_coef", exact=True),
    Word("TRL", "learning_rate", "--actor_learning_rate", exact=True),
    Word("PyTorch", "lr", "--learning_rate", exact=True),
    Word("PyTorch", "lr", "--actor_learning_rate", exact=True),
    Word("TRL", "train_dataset", "--prompt_data", exact=True),
    Word("TRL", "train_dataset", "--dataset", exact=True),
    Word("TRL", "dataset", "--prompt_data", exact=True),
    Word("TRL", "args", "--config FILE.yaml", in_python="its fields as arguments of the call"),
    Word("TRL", "processing_class", "--pretrain", in_python="tokenizer="),
    Word("TRL", "peft_config", "--lora_rank 16 --lora_alpha 32"),
    Word("TRL", "callbacks", "--use_wandb or --use_tensorboard FOLDER", in_python="on_iteration="),
    Word("TRL", "formatting_func", "--input_template"),
    Word("TRL", "model_init_kwargs", "--bf16 --attn_implementation"),
    Word(
        "TRL",
        "reward_funcs",
        "--reward_func FILE.py or --reward_verifier NAME",
        in_python="reward=[FUNCTION, 'VERIFIER', ...]",
    ),
    Word("TRL", "reward_model", "--reward_pretrain", exact=True, in_python="reward="),
    Word("TRL", "value_model", "--critic_pretrain", exact=True),
    Word("TRL", "response_length", "--generate_max_len", exact=True),
    Word("TRL", "max_seq_length", "--max_len", exact=True),
    Word("TRL", "use_vllm", "--rollout_engine vllm"),
    Word("TRL", "mask_truncated_completions", "--mask_truncated", exact=True),
    Word("TRL", "use_peft", "--lora_rank 16"),
    Word("TRL", "load_in_8bit", "--load_in_4bit --bf16"),
    Word("TRL", "per_device_eval_batch_size", "--micro_train_batch_size"),
    Word("TRL", "generation_batch_size", "--rollout_batch_size"),
    Word("TRL", "num_iterations", "--max_epochs", exact=True),
    Word("TRL", "num_ppo_epochs", "--max_epochs", exact=True),
    Word("TRL", "epsilon_high", "--eps_clip_low_high 0.2 0.28"),
    Word("TRL", "cliprange", "--eps_clip", exact=True),
    Word("TRL", "cliprange_value", "--value_clip", exact=True),
    Word("TRL", "lam", "--lambd", exact=True),
    Word("TRL", "scale_rewards", "--advantage_estimator dr_grpo"),
    Word("TRL", "importance_sampling_level", "--policy_loss_type gspo"),
    Word("TRL", "sft_model_path", "--pretrain", exact=True),
    Word("TRL", "loss_type", "--preference_loss"),  # its DPO's
    Word("TRL", "loss_type", "--loss_reduction"),  # its GRPO's
    Word("TRL", "rpo_alpha", "--nll_loss_coef", exact=True),
    Word("TRL", "ref_model", "--ref_pretrain", exact=True),
    Word("TRL", "completion_only_loss", "--pretrain_mode False"),
    Word("TRL", "assistant_only_loss", "--multiturn"),
    Word("TRL", "dataset_text_field", "--input_key TEXT --pretrain_mode"),
    Word("TRL", "chat_template_path", "--tokenizer_chat_template", exact=True),
    Word("TRL", "dataset_test_split", "--eval_split", exact=True),
    Word("TRL", "resume_from_checkpoint", "--load_checkpoint"),
    Word("TRL", "save_total_limit", "--max_ckpt_num", exact=True),
    Word("TRL", "eval_strategy", "--eval_steps"),
    Word("TRL", "save_strategy", "--save_steps"),
    Word("TRL", "report_to", "--use_wandb or --use_tensorboard FOLDER"),
    Word("TRL", "warmup_steps", "--lr_warmup_ratio"),
    Word("TRL", "adam_beta1", "--adam_betas 0.9 0.95"),
    Word("TRL", "max_staleness", "--async_train --async_staleness"),  # of its asynchronous GRPO, as the next two
    Word("TRL", "queue_maxsize", "--async_train --async_queue_size"),
    Word("TRL", "max_inflight_tasks", "--rollout_slots"),
    Word("TRL", "fp16", "--bf16"),
    Word("TRL", "torch_dtype", "--bf16"),
    Word("TRL", "dtype", "--bf16"),
    # OpenRLHF's dotted flags that are no exact synonyms; those that are are in DOTTED
    Word("OpenRLHF", "ds.param_dtype", "--bf16"),
    Word("OpenRLHF", "algo.advantage.is_correction_type", "--mismatch_correction"),
    Word("OpenRLHF", "algo.advantage.is_correction_threshold", "--mismatch_correction tis --mismatch_range 0.5 2"),
    # verl
    Word("verl", "algorithm.adv_estimator", "--advantage_estimator"),
    Word("verl", "algorithm.kl_ctrl.kl_coef", "--init_kl_coef", exact=True),
    Word("verl", "data.train_files", "--prompt_data", exact=True),
    Word("verl", "data.val_files", "--eval_dataset", exact=True),
    Word("verl", "data.train_batch_size", "--rollout_batch_size", exact=True),
    Word("verl", "data.max_prompt_length", "--prompt_max_len", exact=True),
    Word("verl", "data.max_response_length", "--generate_max_len", exact=True),
    Word("verl", "data.prompt_key", "--input_key", exact=True),
    Word("verl", "actor_rollout_ref.model.path", "--pretrain", exact=True),
    Word("verl", "actor_rollout_ref.actor.optim.lr", "--actor_learning_rate", exact=True),
    Word("verl", "actor_rollout_ref.actor.ppo_mini_batch_size", "--train_batch_size"),
    Word("verl", "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu", "--micro_train_batch_size", exact=True),
    Word("verl", "actor_rollout_ref.actor.ppo_epochs", "--max_epochs", exact=True),
    Word("verl", "actor_rollout_ref.actor.clip_ratio", "--eps_clip", exact=True),
    Word("verl", "actor_rollout_ref.actor.use_kl_loss", "--use_kl_loss", exact=True),
    Word("verl", "actor_rollout_ref.actor.kl_loss_coef", "--init_kl_coef", exact=True),
    Word("verl", "actor_rollout_ref.rollout.n", "--n_samples_per_prompt", exact=True),
    Word("verl", "actor_rollout_ref.rollout.temperature", "--temperature", exact=True),
    Word("verl", "critic.optim.lr", "--critic_learning_rate", exact=True),
    Word("verl", "reward_model.model.path", "--reward_pretrain", exact=True),
    Word("verl", "reward.reward_model.model_path", "--reward_pretrain", exact=True),
    Word("verl", "custom_reward_function.path", "--reward_func FILE.py"),
    Word("verl", "reward.custom_reward_function.path", "--reward_func FILE.py"),
    Word("verl", "critic.model.path", "--critic_pretrain", exact=True),
    Word("verl", "algorithm.gamma", "--gamma", exact=True),
    Word("verl", "algorithm.lam", "--lambd", exact=True),
    Word("verl", "algorithm.use_kl_in_reward", "--use_kl_loss False"),
    Word("verl", "algorithm.norm_adv_by_std_in_grpo", "--advantage_estimator dr_grpo"),
    Word("verl", "algorithm.filter_groups.enable", "--dynamic_filtering"),
    Word("verl", "actor_rollout_ref.actor.clip_ratio_low", "--eps_clip_low_high 0.2 0.28"),
    Word("verl", "actor_rollout_ref.actor.clip_ratio_high", "--eps_clip_low_high 0.2 0.28"),
    Word("verl", "actor_rollout_ref.actor.clip_ratio_c", "--dual_clip", exact=True),
    Word("verl", "actor_rollout_ref.actor.loss_agg_mode", "--loss_reduction"),
    Word("verl", "actor_rollout_ref.actor.policy_loss.loss_mode", "--policy_loss_type"),
    Word("verl", "actor_rollout_ref.actor.entropy_coeff", "--entropy_loss_coef", exact=True),
    Word("verl", "actor_rollout_ref.actor.kl_loss_type", "--kl_estimator"),
    Word("verl", "actor_rollout_ref.actor.use_dynamic_bsz", "--use_dynamic_batch", exact=True),
    Word("verl", "actor_rollout_ref.actor.ppo_max_token_len_per_gpu", "--train_max_tokens_per_gpu", exact=True),
    Word("verl", "actor_rollout_ref.actor.grad_clip", "--max_norm", exact=True),
    Word("verl", "actor_rollout_ref.actor.ulysses_sequence_parallel_size", "--ring_attn_size"),
    Word("verl", "actor_rollout_ref.model.lora_rank", "--lora_rank", exact=True),
    Word("verl", "actor_rollout_ref.model.lora_alpha", "--lora_alpha", exact=True),
    Word("verl", "actor_rollout_ref.model.enable_gradient_checkpointing", "--gradient_checkpointing", exact=True),
    Word("verl", "actor_rollout_ref.rollout.top_p", "--top_p", exact=True),
    Word("verl", "actor_rollout_ref.rollout.name", "--rollout_engine"),
    Word("verl", "actor_rollout_ref.rollout.tensor_model_parallel_size", "--vllm_tensor_parallel_size", exact=True),
    Word("verl", "actor_rollout_ref.rollout.gpu_memory_utilization", "--vllm_gpu_memory_utilization", exact=True),
    Word("verl", "actor_rollout_ref.rollout.multi_turn.max_assistant_turns", "--max_turns", exact=True),
    Word("verl", "trainer.total_epochs", "--num_episodes", exact=True),
    Word("verl", "trainer.total_training_steps", "--max_steps", exact=True),
    Word("verl", "trainer.save_freq", "--save_steps", exact=True),
    Word("verl", "trainer.test_freq", "--eval_steps", exact=True),
    Word("verl", "trainer.default_local_dir", "--ckpt_path", exact=True),
    Word("verl", "trainer.n_gpus_per_node", "--nproc", exact=True),
    Word("verl", "trainer.nnodes", "--ray --actor_num_nodes"),
    Word("verl", "trainer.logger", "--use_wandb or --use_tensorboard FOLDER"),
    Word("verl", "trainer.resume_mode", "--load_checkpoint"),
    Word("verl", "trainer.v1.sampler.max_off_policy_threshold", "--async_train --async_staleness"),
    Word("verl", "async_training.staleness_threshold", "--async_train --async_staleness"),
    Word("verl", "async_training.partial_rollout", "--async_train --partial_rollout"),
    # prime-rl, on its command line or in its files
    Word("prime-rl", "model.name", "--pretrain", exact=True),
    Word("prime-rl", "seq_len", "--prompt_max_len --generate_max_len"),
    Word("prime-rl", "orchestrator.batch_size", "--train_batch_size", exact=True),
    Word("prime-rl", "orchestrator.group_size", "--n_samples_per_prompt", exact=True),
    Word("prime-rl", "orchestrator.train.group_size", "--n_samples_per_prompt", exact=True),
    Word("prime-rl", "rollouts_per_example", "--n_samples_per_prompt", exact=True),
    Word("prime-rl", "orchestrator.train.sampling.max_completion_tokens", "--generate_max_len", exact=True),
    Word("prime-rl", "orchestrator.train.sampling.temperature", "--temperature", exact=True),
    Word("prime-rl", "trainer.optim.lr", "--actor_learning_rate", exact=True),
    Word("prime-rl", "trainer.model.lora.rank", "--lora_rank", exact=True),
    Word("prime-rl", "ckpt.interval", "--save_steps", exact=True),
    Word("prime-rl", "wandb.project", "--use_wandb --wandb_project"),
    # what others call how old answers may get
    Word("prime-rl", "max_off_policy_steps", "--async_train --async_staleness"),
    Word("prime-rl", "orchestrator.max_off_policy_steps", "--async_train --async_staleness"),
    Word("prime-rl", "max_async_level", "--async_train --async_queue_size"),
    Word("AReaL", "max_head_offpolicyness", "--async_train --async_staleness"),
    Word("AReaL", "rollout.max_head_offpolicyness", "--async_train --async_staleness"),
    Word("SkyRL", "trainer.fully_async.max_staleness_steps", "--async_train --async_staleness"),
    Word("NeMo-RL", "grpo.async_grpo.max_trajectory_age_steps", "--async_train --async_staleness"),
)

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


def advice(word: str, known: Container[str], *, in_python: bool = False) -> str | None:
    """One clause about another tool's word, in a job that has the options `known`; None: no tool calls anything so."""
    found = [entry for entry in WORDS if entry.word == word]
    fitting = next((entry for entry in found if all(name in known for name in entry.options)), None)
    if fitting is not None:
        relation = "is" if fitting.exact else "becomes"
        ours = fitting.in_python if in_python and fitting.in_python else fitting.ours
        return f"{fitting.tool}'s {word} {relation} {ours} here"
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
