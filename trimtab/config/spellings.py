"""Names that documents and other projects give to our options. An alias is an exact synonym, unit included."""

from collections.abc import Container

ALIASES: dict[str, str] = {
    # OpenRLHF's documents
    "max_epoch": "max_epochs",
    "train_split": "dataset_split",
    "wandb": "use_wandb",
    "value_prefix_head": "value_head_prefix",
    "rollout_micro_batch_size": "micro_rollout_batch_size",
    "n_samples_per_prompts": "n_samples_per_prompt",
    # OpenRLHF's since April 2026
    "train.agent_func_path": "agent_func_path",
    "train.async_enable": "async_train",
    "train.async_queue_size": "async_queue_size",
    "train.partial_rollout_enable": "partial_rollout",
    "train.num_episodes": "num_episodes",
    "train.max_epochs": "max_epochs",
    "train.batch_size": "train_batch_size",
    "train.micro_batch_size": "micro_train_batch_size",
    "rollout.batch_size": "rollout_batch_size",
    "rollout.micro_batch_size": "micro_rollout_batch_size",
    "rollout.n_samples_per_prompt": "n_samples_per_prompt",
    "rollout.max_new_tokens": "generate_max_len",
    "data.input_key": "input_key",
    "data.label_key": "label_key",
    "data.apply_chat_template": "apply_chat_template",
    "data.max_samples": "max_samples",
    "vllm.num_engines": "vllm_num_engines",
    "vllm.tensor_parallel_size": "vllm_tensor_parallel_size",
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
    return IN_RL[name] if IN_RL.get(name) in known else ALIASES.get(name, name)


def aliases_of(name: str, known: Container[str]) -> tuple[str, ...]:
    """The other names of an option in a job with these options."""
    return tuple(alias for alias in ALIASES if meant(alias, known) == name)
