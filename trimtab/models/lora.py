"""LoRA adapters with PEFT: add them, initialize them in a sharded model, disable them, remove them temporarily."""

import contextlib
import copy
import re
from collections.abc import Iterator

import torch
from peft import LoraConfig, get_peft_model, inject_adapter_in_model
from peft.tuners.lora import Linear
from peft.tuners.lora.layer import ParamWrapper
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import ModulesToSaveWrapper
from torch import Tensor, nn

from trimtab.config.training_options import LoraOptions
from trimtab.data.hub import first_line
from trimtab.distributed.fsdp import keep_shard
from trimtab.errors import UserError

ALL_LINEAR = "all-linear"
LAYER = "layer"


def add_adapters(model: nn.Module, options: LoraOptions, task_type: str = "CAUSAL_LM") -> nn.Module:
    """The model with new adapters; everything else is frozen, except a reward head (`SEQ_CLS`)."""
    targets = list(map(str, options.target_modules))
    unlike = [name for name, module in model.named_modules() if not _is_like_linear(module)]
    # Collected before PEFT changes modules, since it may fail half-way.
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    layers = [name for name, module in model.named_modules() if isinstance(module, nn.Linear) and module is not head]
    linear = _last_parts(name for name in layers if name not in unlike)
    asked = f"--target_modules {' '.join(targets)}"

    def is_named(name: str) -> bool:
        return any(name == target or name.endswith(f".{target}") for target in targets)

    if refused := [name for name in unlike if is_named(name)]:
        kind, others = type(model.get_submodule(refused[0])).__name__, ", ".join(linear)
        raise UserError(f"{asked}: {refused[0]} is a {kind}, to which no adapter fits; give others of {others}")
    config = LoraConfig(
        task_type=task_type,
        r=options.lora_rank,
        lora_alpha=options.lora_alpha,
        lora_dropout=options.lora_dropout,
        target_modules=ALL_LINEAR if targets == [ALL_LINEAR] else targets,
        exclude_modules=unlike or None,
    )
    try:
        # Adapters keep the working weights' dtype; their fp32 copies belong to the optimizer.
        return get_peft_model(model, config, autocast_adapter_dtype=False)
    except ValueError as error:
        if targets != [ALL_LINEAR] and not any(is_named(name) for name, _ in model.named_modules()):
            known = ", ".join(linear)
            raise UserError(f"{asked}: no such layers in this model; its linear layers are {known}") from error
        # "[PEFT:...] Module 'out_proj' is incompatible with ... . Please ...": keep the sentence with the reason.
        reason = re.sub(r"^\[.*?\] *", "", first_line(error)).split(". ")[0]
        working = [name for name in linear if not re.search(rf"\b{re.escape(name)}\b", str(error))]
        raise UserError(f"{asked}: PEFT refuses it: {reason}; give --target_modules {' '.join(working)}") from error


def _is_like_linear(module: nn.Module) -> bool:
    """Whether a module computes a linear map. False for subclasses of nn.Linear that compute something else (routers
    that also select experts, grouped products): PEFT would add a linear layer's adapter to their output."""
    # Other subclasses are quantized layers, which PEFT supports.
    of_a_model = type(module).__module__.startswith(("transformers.models.", "transformers_modules."))
    if not (of_a_model and isinstance(module, nn.Linear)):
        return True
    fake = copy.copy(module)
    fake._parameters = {name: p if p is None else p.to("meta") for name, p in module._parameters.items()}
    try:
        found = fake.forward(torch.empty(1, 3, module.in_features, dtype=module.weight.dtype, device="meta"))
    except (RuntimeError, TypeError, ValueError, IndexError):
        return False
    return isinstance(found, Tensor) and found.shape == (1, 3, module.out_features)


def _last_parts(names: Iterator[str]) -> list[str]:
    """Layer names in the form of --target_modules."""
    return sorted({name.rsplit(".", 1)[-1] for name in names})


def refuse_adapted_experts(model: nn.Module, why: str) -> None:
    """Refuse adapters on stacked expert weights: in a sharded model, since PEFT adds a product of whole weights to
    them, and for engines that know no such adapters."""
    if any(isinstance(module, ParamWrapper) for module in model.modules()):
        linear = _last_parts(name for name, module in model.named_modules() if isinstance(module, Linear))
        raise UserError(
            f"--target_modules all-linear: adapters of experts {why}; name the other layers: "
            f"--target_modules {' '.join(linear)}"
        )


def fill_adapters(model: nn.Module, random_state: Tensor) -> Tensor:
    """Initialize the adapters of a sharded model, equally for any number of processes; returns the random state after
    it.

    PEFT draws every adapter from the global random stream as it adds it. This draws the same values layer by layer,
    starting from `random_state` (of the CPU before the adapters were added), and each process keeps its shard: no
    process holds more than one layer's whole adapter.
    """
    config = copy.copy(model.peft_config["default"])
    config.target_modules, config.modules_to_save = [LAYER], None
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.set_rng_state(random_state)
        for layer in model.modules():
            if not isinstance(layer, BaseTunerLayer):
                continue
            base = layer.get_base_layer()
            hollow = copy.copy(base)  # its weights take no memory
            hollow._parameters = {
                name: p if p is None else nn.Parameter(torch.zeros(()).expand(p.shape), False)
                for name, p in base._parameters.items()
            }
            adapted = inject_adapter_in_model(config, nn.ModuleDict({LAYER: hollow}))[LAYER]
            drawn = dict(adapted.named_parameters())
            for name, parameter in layer.named_parameters():
                if parameter.requires_grad:
                    keep_shard(drawn[name], parameter)
        return torch.get_rng_state()


@contextlib.contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Disable adapters inside the context. PEFT's own switch would also freeze them, which FSDP would keep."""
    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    before = [layer._disable_adapters for layer in layers]
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer, state in zip(layers, before):
            layer._disable_adapters = state


def base_layer(module: nn.Module) -> nn.Module:
    """The layer without its adapter, if it has one."""
    if isinstance(module, ModulesToSaveWrapper):
        return module.original_module
    return module.get_base_layer() if isinstance(module, BaseTunerLayer) else module


@contextlib.contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Replace adapted layers by their base layers inside the context, so that modules have their original names."""
    replaced = []
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if (plain := base_layer(child)) is not child:
                replaced.append((parent, name, child))
                setattr(parent, name, plain)
    try:
        yield
    finally:
        for parent, name, child in replaced:
            setattr(parent, name, child)
