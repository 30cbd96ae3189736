"""Fill a model that is split already, each process its own parts, from safetensors files.

Where the files' tensors have the parameters' names, we read them. Some kinds of models are stored in another form
(Mixtral's files have a tensor an expert, its modules one for all experts): those are read by transformers' own loader,
which converts, and reads of a split parameter only what this process holds. That goes through private names of it,
which tests hold it to; where they are not as expected the model has to be loaded whole.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from trimtab.config.groups import LoadOptions
from trimtab.data.hub import hub_or_cache
from trimtab.distributed.device import Device
from trimtab.distributed.fsdp import blocks_of, keep_part, local
from trimtab.distributed.mesh import Mesh
from trimtab.distributed.random_state import preserve_rng_state
from trimtab.models.lora import adapters_aside
from trimtab.models.packed import PackedModel
from trimtab.models.pretrained import WeightFiles, fake_model, quiet_transformers, refuse_fresh_weights
from trimtab.models.reward import HEAD
from trimtab.models.selfcheck import Verdict, choose_path_without_weights

Found = dict[str, set]
"""What loading found, as Hugging Face tells it: missing_keys, and mismatched_keys (name, shape there, shape needed)."""


class DirectReader:
    """Parameters are read under their own names. `spare`: a module whose weights need not be there."""

    def __init__(self, model: nn.Module, files: WeightFiles, spare: str | None):
        self.files = files
        self.keys = {tensor: key for tensor, key in _stored(model, files).items() if self._fits(model, tensor, key)}
        missing = model.state_dict().keys() - self.keys.keys()
        self.found: Found = {"missing_keys": missing, "mismatched_keys": set()}
        self.suits = all(name.startswith(f"{spare}.") for name in missing)

    def _fits(self, model: nn.Module, name: str, key: str) -> bool:
        return self.files.shape(key) == tuple(_tensor(model, name).shape)

    def fill_weights(self, model: nn.Module) -> Found:
        filled = set()
        with torch.no_grad():
            for name, key in self.keys.items():
                tensor = _tensor(model, name)
                if id(tensor) not in filled:
                    filled.add(id(tensor))
                    _fill(tensor, self.files, key)
        model._weight_conversions = []  # nothing to turn back when it is saved
        return self.found


class ConvertingReader:
    """Parameters are made by transformers' own loader. `renamed`: patterns of names in the files and what they mean."""

    def __init__(self, files: WeightFiles, renamed: dict[str, str] | None):
        self.files, self.renamed = files, renamed

    def fill_weights(self, model: nn.Module) -> Found:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.modeling_utils import LoadStateDictConfig

        config = LoadStateDictConfig(
            ignore_mismatched_sizes=True,
            dtype=torch.float32,
            weight_mapping=get_model_conversion_mapping(model, self.renamed, None),
        )
        with preserve_rng_state(), torch.no_grad():  # what is missing would be drawn
            info, _ = model._load_pretrained_model(model, None, [str(path) for path in self.files.paths], config)
            found = model._finalize_model_loading(model, config, info)
        return {"missing_keys": found.missing_keys, "mismatched_keys": found.mismatched_keys}


WeightReader = DirectReader | ConvertingReader


def choose_reader(
    model: nn.Module, files: WeightFiles, processes: int, *, spare: str | None, renamed: dict[str, str] | None
) -> WeightReader | None:
    """How a fake_model is filled from these files in parts; None: it cannot be."""
    converters = _converters(model)
    if converters is None:
        return None
    by_name = DirectReader(model, files, spare)
    if by_name.suits and not converters and not renamed:
        return by_name
    # A stack of fewer experts than processes leaves some with nothing to stack.
    if any(p.ndim > 2 and p.shape[0] < processes for p in model.parameters()):
        return None
    return ConvertingReader(files, renamed)


def _converters(model: nn.Module) -> list[Any] | None:
    """What transformers does to this kind of model's stored tensors; None: it cannot be asked, or not used by us."""
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter
        from transformers.modeling_utils import LoadStateDictConfig

        mapping = get_model_conversion_mapping(model, None, None)
        known = {field.name for field in dataclasses.fields(LoadStateDictConfig)}
    except (ImportError, TypeError):
        return None
    if not known >= {"ignore_mismatched_sizes", "dtype", "weight_mapping"}:
        return None
    if not all(hasattr(model, name) for name in ("_load_pretrained_model", "_finalize_model_loading")):
        return None
    return [entry for entry in mapping if isinstance(entry, WeightConverter)]


def untie_different(model: nn.Module, files: WeightFiles) -> None:
    """Where the files hold two different tensors for weights that the configuration ties, they are two, as they are to
    Hugging Face's loader."""
    for target, source in list(model.all_tied_weights_keys.items()):
        if target in files and source in files and not files.same(target, source):
            place, _, name = target.rpartition(".")
            setattr(model.get_submodule(place), name, nn.Parameter(torch.empty_like(model.get_parameter(source))))
            del model.all_tied_weights_keys[target]


def mismatched(model: nn.Module, files: WeightFiles) -> set[tuple]:
    """(name, shape in the files, shape needed): transformers' loader does not see it of what it reads in parts."""
    shapes = {name: tuple(_tensor(model, name).shape) for name in model.state_dict()}
    return {(name, files.shape(name), shape) for name, shape in shapes.items() if name in files} - {
        (name, shape, shape) for name, shape in shapes.items()
    }


def fill_weights(module: PackedModel, reader: WeightReader, device: torch.device, *, offload: bool) -> Found:
    """Memory and contents for every part of a fake_model that is split; adapters get memory only."""
    if isinstance(reader, DirectReader):
        materialise(module, device, offload=offload)
        compute_buffers(module.inner)
    with adapters_aside(module.inner):
        found = reader.fill_weights(module.inner)
    if isinstance(reader, ConvertingReader):
        materialise(module, device, offload=offload)
    return found


def materialise(module: nn.Module, device: torch.device, *, offload: bool) -> None:
    """Memory for this process's parts, with nothing in it yet, on the device (with `offload` in main memory, which
    buffers are not). What has memory already is moved there."""
    ties: dict[int, list[tuple[nn.Module, str]]] = {}
    for part in module.modules():
        for name, parameter in part.named_parameters(recurse=False):
            ties.setdefault(id(parameter), []).append((part, name))
    parameters = torch.device("cpu") if offload else device

    def place(tensor: Tensor) -> Tensor:
        where = parameters if local(tensor) is not tensor else device
        return torch.empty_like(tensor, device=where) if tensor.is_meta else tensor.to(where)

    module._apply(place)
    for places in ties.values():  # each module has got a parameter of its own
        (first, name), *others = places
        for part, other in others:
            setattr(part, other, getattr(first, name))


def compute_buffers(model: nn.Module) -> None:
    """What is in no file: rotary frequencies and the like, from the configuration."""
    for parameter in model.parameters():
        parameter._is_hf_initialized = True  # those are left alone
    with preserve_rng_state(), torch.no_grad():
        for module in model.modules():
            if module._non_persistent_buffers_set:
                model._init_weights(module)


def _stored(model: nn.Module, files: WeightFiles) -> dict[str, str]:
    """The name in the files of every tensor of the state that is there, under its own name or one it is tied to."""
    aliases: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        aliases.setdefault(id(parameter), []).append(name)
    stored = {}
    for name in model.state_dict():
        names = [name, *aliases.get(id(_tensor(model, name)), [])]
        if key := next((key for key in names if key in files), None):
            stored[name] = key
    return stored


def _tensor(model: nn.Module, name: str) -> Tensor:
    place, _, leaf = name.rpartition(".")
    return getattr(model.get_submodule(place), leaf)


def _fill(tensor: Tensor, files: WeightFiles, key: str) -> None:
    for block in blocks_of(tensor):
        if block.size:
            local(tensor)[block.held].copy_(files.read(key, block.slices))


# ---- Load a model that no process holds whole. A fake_model without weights is settled in everything - dropout,
# adapters, path, precision - and split; then each process makes room for its own parts and reads them from the
# files.


@dataclass
class EmptyModel:
    """A fake_model, and how it will be filled."""

    model: nn.Module
    reader: WeightReader
    weights: str  # fingerprint of the files
    has_head: bool  # a decoder's score head is in the files


def begin_sharded_load(
    pretrain: str, loader: Any, options: LoadOptions, mesh: Mesh, flag: str, *, head: str | None = None, **more: Any
) -> EmptyModel | None:
    """None: it cannot be filled in parts. `head`: what a score head is called in the files, where it may be missing;
    `more`: for the configuration."""
    quiet_transformers()
    files = WeightFiles.find(pretrain, flag)
    if files is None:
        return None
    building: dict[str, Any] = {"dtype": torch.float32}
    if options.attn_implementation is not None:
        building["attn_implementation"] = options.attn_implementation
    model = fake_model(pretrain, loader, flag, building=building, **more)
    _read_generation_config(model, pretrain)
    untie_different(model, files)
    spare = HEAD if head is not None else None
    renamed = {rf"^{head}\.": f"{HEAD}."} if head not in (None, HEAD) and f"{head}.weight" in files else None
    reader = choose_reader(model, files, mesh.gradients.size, spare=spare, renamed=renamed)
    if reader is None:
        return None
    wrong = {entry for entry in mismatched(model, files) if entry[0] != f"{spare}.weight"}
    refuse_fresh_weights(pretrain, {"mismatched_keys": wrong, "missing_keys": set()}, flag=flag)
    stored = [files.shape(name) for name in (f"{head}.weight", f"{HEAD}.weight") if name in files]
    has_head = hasattr(model, HEAD) and tuple(getattr(model, HEAD).weight.shape) in stored
    return EmptyModel(model, reader, files.fingerprint(), has_head)


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
