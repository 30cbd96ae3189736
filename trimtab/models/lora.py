"""Low-rank adapters through PEFT."""

import contextlib
import copy
import re
from collections.abc import Iterator

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

from trimtab.config.groups import LoraOptions
from trimtab.distributed.fsdp import keep_part
from trimtab.errors import UserError
from trimtab.models.pretrained import first_line

ALL_LINEAR = "all-linear"


def add_adapters(model: nn.Module, options: LoraOptions, task_type: str = "CAUSAL_LM") -> nn.Module:
    """The model with fresh adapters; everything else is frozen, but for a reward head (`SEQ_CLS`)."""
    from peft import LoraConfig, get_peft_model

    targets = list(map(str, options.target_modules))
    unlike = [name for name, module in model.named_modules() if not _is_like_linear(module)]
    linear = _linear_names(model, unlike)  # before PEFT adapts any of them, should it fail half-way
    asked = f"--target_modules {' '.join(targets)}"
    if refused := [name for name in unlike if _is_named(name, targets)]:
        kind = type(model.get_submodule(refused[0])).__name__
        raise UserError(f"{asked}: {refused[0]} is a {kind}, to which no adapter fits; give others of {_words(linear)}")
    config = LoraConfig(
        task_type=task_type,
        r=options.lora_rank,
        lora_alpha=options.lora_alpha,
        lora_dropout=options.lora_dropout,
        target_modules=ALL_LINEAR if targets == [ALL_LINEAR] else targets,
        exclude_modules=unlike or None,
    )
    try:
        # Adapters keep the working weights' dtype; their fp32 copies belong to the optimiser.
        return get_peft_model(model, config, autocast_adapter_dtype=False)
    except ValueError as error:
        if targets != [ALL_LINEAR] and not any(_is_named(name, targets) for name, _ in model.named_modules()):
            raise UserError(f"{asked}: no such layers in this model; its linear layers are {_words(linear)}") from error
        # "[PEFT:...] Module 'out_proj' is incompatible with ... . Please ...": the sentence that says what is wrong.
        reason = re.sub(r"^\[.*?\] *", "", first_line(error)).split(". ")[0]
        working = [name for name in linear if not re.search(rf"\b{re.escape(name)}\b", str(error))]
        raise UserError(f"{asked}: PEFT refuses it: {reason}; give --target_modules {' '.join(working)}") from error


def _is_like_linear(module: nn.Module) -> bool:
    """False of subclasses of nn.Linear that compute something else: routers that also choose experts, products of
    groups. PEFT would add a linear layer's adapter to their output."""
    # Other subclasses are quantised layers, which PEFT knows.
    of_a_model = type(module).__module__.startswith(("transformers.models.", "transformers_modules."))
    if not (of_a_model and isinstance(module, nn.Linear)):
        return True
    hollow = copy.copy(module)
    hollow._parameters = {name: p if p is None else p.to("meta") for name, p in module._parameters.items()}
    try:
        found = hollow.forward(torch.empty(1, 3, module.in_features, dtype=module.weight.dtype, device="meta"))
    except (RuntimeError, TypeError, ValueError, IndexError):
        return False
    return isinstance(found, Tensor) and found.shape == (1, 3, module.out_features)


def _linear_names(model: nn.Module, unlike: list[str]) -> list[str]:
    """Of the layers that adapters fit, as --target_modules takes them."""
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    found = (name for name, module in model.named_modules() if isinstance(module, nn.Linear) and module is not head)
    return sorted({name.rsplit(".", 1)[-1] for name in found if name not in unlike})


def _is_named(name: str, targets: list[str]) -> bool:
    return any(name == target or name.endswith(f".{target}") for target in targets)


def _words(names: list[str]) -> str:
    return ", ".join(names)


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


# ---- What adapters begin with, for a model whose parts are filled in one by one. PEFT draws the whole of every
# adapter from the global random stream as it puts it in. The same is drawn here again, layer by layer and from
# the same place of the stream, and each process keeps its part: so adapters begin alike in any number of
# processes, and no process holds more than one layer's.


LAYER = "layer"


def fill_adapters(model: nn.Module, random_state: Tensor) -> Tensor:
    """`random_state`: of the CPU, before the adapters were put into the model. Gives the one behind what was drawn."""
    config = copy.copy(model.peft_config["default"])
    config.target_modules, config.modules_to_save = [LAYER], None
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.set_rng_state(random_state)
        for layer in model.modules():
            if isinstance(layer, BaseTunerLayer):
                drawn = dict(_fresh(layer.get_base_layer(), config).named_parameters())
                for name, parameter in layer.named_parameters():
                    if parameter.requires_grad:
                        keep_part(drawn[name], parameter)
        return torch.get_rng_state()


def _fresh(base: nn.Module, config: LoraConfig) -> nn.Module:
    """The adapted layer that PEFT makes of one like `base`, whose own weights take no memory."""
    hollow = copy.copy(base)
    hollow._parameters = {
        name: parameter if parameter is None else nn.Parameter(torch.zeros(()).expand(parameter.shape), False)
        for name, parameter in base._parameters.items()
    }
    return inject_adapter_in_model(config, nn.ModuleDict({LAYER: hollow}))[LAYER]


@contextlib.contextmanager
def adapters_aside(model: nn.Module) -> Iterator[None]:
    """Inside, the model's modules have the names and places that they have without adapters."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import ModulesToSaveWrapper

    replaced = []
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, BaseTunerLayer | ModulesToSaveWrapper):
                plain = child.get_base_layer() if isinstance(child, BaseTunerLayer) else child.original_module
                replaced.append((parent, name, child))
                setattr(parent, name, plain)
    try:
        yield
    finally:
        for parent, name, child in replaced:
            setattr(parent, name, child)
