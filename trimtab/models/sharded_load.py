"""Load a model that no process holds whole.

A skeleton without weights is settled in everything - dropout, adapters, path, precision - and split; then each process
makes room for its own parts and reads them from the files.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from trimtab.config.groups import LoadOptions
from trimtab.data.hub import hub_or_cache
from trimtab.distributed.device import Device
from trimtab.distributed.mesh import Mesh
from trimtab.distributed.sharding import keep_part
from trimtab.models.filling import Filling, choose_filling, mismatched, untie_different
from trimtab.models.hugging_face import quiet_transformers, refuse_fresh_weights, skeleton
from trimtab.models.miniature import choose_path_without_weights
from trimtab.models.packed import PackedModel
from trimtab.models.reward import HEAD
from trimtab.models.selfcheck import Verdict
from trimtab.models.weight_files import WeightFiles


@dataclass
class Unfilled:
    """A skeleton, and how it will be filled."""

    model: nn.Module
    filling: Filling
    weights: str  # fingerprint of the files
    has_head: bool  # a decoder's score head is in the files


def begin(
    pretrain: str, loader: Any, options: LoadOptions, mesh: Mesh, flag: str, *, head: str | None = None, **more: Any
) -> Unfilled | None:
    """None: it cannot be filled in parts. `head`: what a score head is called in the files, where it may be missing;
    `more`: for the configuration."""
    quiet_transformers()
    files = WeightFiles.find(pretrain, flag)
    if files is None:
        return None
    building: dict[str, Any] = {"dtype": torch.float32}
    if options.attn_implementation is not None:
        building["attn_implementation"] = options.attn_implementation
    model = skeleton(pretrain, loader, flag, building=building, **more)
    _read_generation_config(model, pretrain)
    untie_different(model, files)
    spare = HEAD if head is not None else None
    renamed = {rf"^{head}\.": f"{HEAD}."} if head not in (None, HEAD) and f"{head}.weight" in files else None
    filling = choose_filling(model, files, mesh.gradients.size, spare=spare, renamed=renamed)
    if filling is None:
        return None
    wrong = {entry for entry in mismatched(model, files) if entry[0] != f"{spare}.weight"}
    refuse_fresh_weights(pretrain, {"mismatched_keys": wrong, "missing_keys": set()}, flag=flag)
    stored = [files.shape(name) for name in (f"{head}.weight", f"{HEAD}.weight") if name in files]
    has_head = hasattr(model, HEAD) and tuple(getattr(model, HEAD).weight.shape) in stored
    return Unfilled(model, filling, files.fingerprint(), has_head)


def settle_path(module: PackedModel, options: LoadOptions, device: Device) -> Verdict:
    """In fp32 on the CPU, unless an attention implementation was asked for that may know only half precision, or only
    the accelerator."""
    if options.attn_implementation is None:
        return choose_path_without_weights(module, packed_allowed=True, dtype=torch.float32, device=torch.device("cpu"))
    dtype = torch.bfloat16 if options.bf16 else torch.float32
    return choose_path_without_weights(module, packed_allowed=False, dtype=dtype, device=device.torch)


def cast_frozen(module: nn.Module) -> None:
    """To bf16 what has no gradient and so needs no fp32 master. A head that is trained in a copy is copied first."""
    for name, parameter in module.named_parameters():
        if not parameter.requires_grad and parameter.is_floating_point() and ".original_module." not in name:
            parameter.data = parameter.data.to(torch.bfloat16)


def set_head(module: PackedModel, weight: Tensor | None) -> None:
    """Give the score head its weight, if it was drawn; and the copy of it that is trained beside adapters."""
    head = getattr(module.inner, HEAD)
    copies = getattr(head, "modules_to_save", None)
    original = head if copies is None else head.original_module
    with torch.no_grad():
        if weight is not None:
            keep_part(weight, original.weight)
        for copied in (copies or {}).values():
            copied.weight.copy_(original.weight)


def _read_generation_config(model: nn.Module, pretrain: str) -> None:
    """As from_pretrained does: from the model's own file, if it has one."""
    from transformers import GenerationConfig

    if not model.can_generate():
        return
    try:
        with hub_or_cache() as reachable:
            model.generation_config = GenerationConfig.from_pretrained(pretrain, local_files_only=not reachable)
    except (OSError, TypeError):
        pass
