"""Names that documents and other projects give to our options. An alias is an exact synonym, unit included."""

ALIASES: dict[str, str] = {
    # OpenRLHF's documents
    "max_epoch": "max_epochs",
    "train_split": "dataset_split",
    "wandb": "use_wandb",
    "value_prefix_head": "value_head_prefix",
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
}


def aliases_of(name: str) -> tuple[str, ...]:
    return tuple(alias for alias, target in ALIASES.items() if target == name)
