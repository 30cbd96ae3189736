"""Low-rank adapters through PEFT."""

from torch import nn

from trimtab.config.groups import LoraOptions
from trimtab.errors import UserError


def add_adapters(model: nn.Module, options: LoraOptions, task_type: str = "CAUSAL_LM") -> nn.Module:
    """The model with fresh adapters; everything else is frozen, but for a reward head (`SEQ_CLS`)."""
    from peft import LoraConfig, get_peft_model

    targets = options.target_modules
    if isinstance(targets, (list, tuple)):
        targets = "all-linear" if list(targets) == ["all-linear"] else list(targets)
    config = LoraConfig(
        task_type=task_type,
        r=options.lora_rank,
        lora_alpha=options.lora_alpha,
        lora_dropout=options.lora_dropout,
        target_modules=targets,
    )
    try:
        # Adapters keep the working weights' dtype; their fp32 copies belong to the optimiser.
        return get_peft_model(model, config, autocast_adapter_dtype=False)
    except ValueError as error:
        linear = sorted({name.rsplit(".", 1)[-1] for name, m in model.named_modules() if isinstance(m, nn.Linear)})
        message = f"--target_modules {' '.join(map(str, options.target_modules))}: no such layers in this model"
        raise UserError(f"{message}; its linear layers are {', '.join(linear)}") from error


def has_adapters(model: nn.Module) -> bool:
    return hasattr(model, "peft_config")
