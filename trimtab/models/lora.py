"""Low-rank adapters through PEFT."""

import contextlib
from collections.abc import Iterator

from torch import nn

from trimtab.config.groups import LoraOptions
from trimtab.errors import UserError


def add_adapters(model: nn.Module, options: LoraOptions, task_type: str = "CAUSAL_LM") -> nn.Module:
    """The model with fresh adapters; everything else is frozen, but for a reward head (`SEQ_CLS`)."""
    from peft import LoraConfig, get_peft_model

    targets = list(options.target_modules)
    config = LoraConfig(
        task_type=task_type,
        r=options.lora_rank,
        lora_alpha=options.lora_alpha,
        lora_dropout=options.lora_dropout,
        target_modules="all-linear" if targets == ["all-linear"] else targets,
    )
    try:
        # Adapters keep the working weights' dtype; their fp32 copies belong to the optimiser.
        return get_peft_model(model, config, autocast_adapter_dtype=False)
    except ValueError as error:
        linear = sorted({name.rsplit(".", 1)[-1] for name, m in model.named_modules() if isinstance(m, nn.Linear)})
        message = f"--target_modules {' '.join(map(str, options.target_modules))}: no such layers in this model"
        raise UserError(f"{message}; its linear layers are {', '.join(linear)}") from error


def refuse_adapted_experts(model: nn.Module) -> None:
    """PEFT adapts the stacked weights of experts by a product as large as they are, made of whole weights."""
    from peft.tuners.lora.layer import ParamWrapper

    if any(isinstance(module, ParamWrapper) for module in model.modules()):
        linear = sorted({name.rsplit(".", 1)[-1] for name in _adapted_linear(model)})
        raise UserError(
            "--target_modules all-linear: adapters of experts cannot be split over processes; name the other layers: "
            f"--target_modules {' '.join(linear)}"
        )


def _adapted_linear(model: nn.Module) -> list[str]:
    from peft.tuners.lora import Linear

    return [name for name, module in model.named_modules() if isinstance(module, Linear)]


@contextlib.contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """The base model inside. PEFT's own switch also freezes the adapters, which a split model would remember."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    before = [layer._disable_adapters for layer in layers]
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer, state in zip(layers, before):
            layer._disable_adapters = state
