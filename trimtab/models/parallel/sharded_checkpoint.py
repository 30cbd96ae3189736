"""Loading and saving a Hugging Face folder of a sharded model, which no process holds whole.

Loading builds the model without weights, shards it, then reads each process's shards. If the tensors in the files have
the parameters' names, we read them. Some families are stored in another form (Mixtral's files have a tensor for each
expert, its modules one for all): transformers' loader converts those, and reads only this process's shards. That uses
private names of transformers, which tests pin.

Saving gathers one tensor after another with all processes; the process that owns a file writes it, the others free the
tensors. Files have at most FILE_BYTES and are assigned in turn to the processes that see the folder, so a small model
is one file written by rank 0, and all processes write a large one.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trimtab.config.training_options import LoadOptions
from trimtab.data.hub import hub_or_cache
from trimtab.distributed.device import Device
from trimtab.distributed.fsdp import blocks_of, keep_shard, local, reshard_model, splits_width
from trimtab.distributed.mesh import Mesh
from trimtab.distributed.random_state import preserve_rng_state
from trimtab.files import flush
from trimtab.models.lora import without_adapters
from trimtab.models.packed import PackedModel
from trimtab.models.pretrained import INDEX, SINGLE, Found, WeightFiles, fake_model, nothing_found, refuse_fresh_weights
from trimtab.models.reward import HEAD
from trimtab.models.selfcheck import Verdict, choose_path_without_weights
from trimtab.models.weight_export import Group, HFWeights


@dataclass
class ModelSource:
    """A model and the source of its weights: it has them already, or they are read from files after sharding."""

    model: nn.Module
    weights: str = ""  # fingerprint of the files; empty: not computed yet
    found: Found = field(default_factory=nothing_found)  # missing and mismatched weights
    fresh_head: bool = False  # the files have no weights for the model's score head
    files: WeightFiles | None = None  # None: the model has its weights
    keys: dict[str, str] | None = None  # parameter name -> name in the files; None: transformers' loader converts
    renamed: dict[str, str] | None = None  # patterns of names in the files -> names in the model

    def read(self, model: nn.Module) -> Found:
        """Read the weights into `model`, which is sharded, allocated and without adapters."""
        assert self.files is not None
        if self.keys is None:
            return self._convert(model, self.files)
        filled: dict[int, Tensor] = {}  # so that tied tensors are read once
        with torch.no_grad():
            for name, key in self.keys.items():
                tensor = _tensor(model, name)
                if id(tensor) not in filled:
                    filled[id(tensor)] = tensor
                    if self.files.random:
                        local(tensor).normal_(std=0.02) if tensor.ndim > 1 else local(tensor).fill_(1.0)
                        continue
                    for block in blocks_of(tensor):
                        if block.size:
                            held = local(tensor)[block.held]
                            held.copy_(self.files.read(key, block.slices).to(held.device))  # converted there
        model._weight_conversions = []  # nothing to convert back when it is saved
        return self.found

    def _convert(self, model: nn.Module, files: WeightFiles) -> Found:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.modeling_utils import LoadStateDictConfig

        config = LoadStateDictConfig(
            ignore_mismatched_sizes=True,
            dtype=torch.float32,
            weight_mapping=get_model_conversion_mapping(model, self.renamed, None),
        )
        with preserve_rng_state(), torch.no_grad():  # it initializes missing weights randomly
            info, _ = model._load_pretrained_model(model, None, [str(path) for path in files.paths], config)
            found = model._finalize_model_loading(model, config, info)
        return {"missing_keys": found.missing_keys, "mismatched_keys": found.mismatched_keys}


def begin_sharded_load(
    pretrain: str, loader: Any, options: LoadOptions, mesh: Mesh, flag: str, *, head: str | None = None, **more: Any
) -> ModelSource | None:
    """The model without weights; None: its files cannot be read in parts. `head`: the name of a score head, which may
    be missing in the files; `more`: for the configuration."""
    files = WeightFiles.find(pretrain, flag)
    if files is None:
        return None
    building: dict[str, Any] = {"dtype": torch.float32}
    if options.attn_implementation is not None:
        building["attn_implementation"] = options.attn_implementation
    model = fake_model(pretrain, loader, flag, building=building, **more)
    if files.random:
        return ModelSource(model, "random", files=files, keys={name: name for name in model.state_dict()})
    _read_generation_config(model, pretrain)
    _untie_different(model, files)
    spare = HEAD if head is not None else None
    renamed = {rf"^{head}\.": f"{HEAD}."} if head not in (None, HEAD) and f"{head}.weight" in files else None
    keys = _stored_names(model, files)
    missing = model.state_dict().keys() - keys.keys()
    direct = not renamed and not _is_converted(model) and all(name.startswith(f"{spare}.") for name in missing)
    sizes = {mesh.for_sharding(copies=copies).size(-1) for copies in (True, False)} if mesh.size > 1 else set()
    experts = [] if direct else [parameter for parameter in model.parameters() if parameter.ndim > 2]
    by_width = mesh.neighbours == 1 and mesh.sizes["tensor"] == 1
    if any(_leaves_one_empty(p, n) and not (by_width and splits_width(p, n)) for p in experts for n in sizes):
        return None
    # transformers' loader does not detect mismatched shapes when it reads in parts.
    shapes = {name: tuple(_tensor(model, name).shape) for name in model.state_dict() if name != f"{spare}.weight"}
    wrong = {(n, files.shape(n), shape) for n, shape in shapes.items() if n in files and files.shape(n) != shape}
    refuse_fresh_weights(pretrain, nothing_found() | {"mismatched_keys": wrong}, flag=flag)
    stored = [files.shape(name) for name in (f"{head}.weight", f"{HEAD}.weight") if name in files]
    fresh_head = hasattr(model, HEAD) and tuple(getattr(model, HEAD).weight.shape) not in stored
    found = nothing_found() | {"missing_keys": missing}
    return ModelSource(model, files.fingerprint(), found, fresh_head, files, keys if direct else None, renamed)


def _leaves_one_empty(experts: torch.Tensor, parts: int) -> bool:
    """Whether a process would have no expert to stack when they are shared out."""
    return (parts - 1) * -(-experts.shape[0] // parts) >= experts.shape[0]


def resolve_path(module: PackedModel, options: LoadOptions, device: Device) -> Verdict:
    """Self-check a model without weights: in fp32 on the CPU, unless the options name an attention implementation,
    which may support only half precision or only the accelerator."""
    if options.attn_implementation is None:
        return choose_path_without_weights(module, packed_allowed=True, dtype=torch.float32, device=torch.device("cpu"))
    dtype = torch.bfloat16 if options.bf16 else torch.float32
    return choose_path_without_weights(module, packed_allowed=False, dtype=dtype, device=device.torch)


def fill_weights(module: PackedModel, source: ModelSource, device: torch.device, *, offload: bool) -> Found:
    """Allocate and read this process's shards; adapters are only allocated."""
    if source.keys is not None:
        materialise(module, device, offload=offload)
        _compute_buffers(module.inner)
    with without_adapters(module.inner):
        found = source.read(module.inner)
    if source.keys is None:  # transformers' loader allocates by itself
        materialise(module, device, offload=offload)
    return found


def materialise(module: nn.Module, device: torch.device, *, offload: bool) -> None:
    """Allocate this process's shards on the device or, with `offload`, in main memory (except buffers). Tensors that
    are allocated already are moved."""
    ties: dict[int, list[tuple[nn.Module, str]]] = {}
    for part in module.modules():
        for name, parameter in part.named_parameters(recurse=False):
            ties.setdefault(id(parameter), []).append((part, name))
    parameters = torch.device("cpu") if offload else device

    def place(tensor: Tensor) -> Tensor:
        where = parameters if local(tensor) is not tensor else device
        return torch.empty_like(tensor, device=where) if tensor.is_meta else tensor.to(where)

    module._apply(place)
    for (first, name), *others in ties.values():  # _apply creates separate parameters for tied ones
        for part, other in others:
            setattr(part, other, getattr(first, name))


def cast_frozen(module: nn.Module) -> None:
    """Cast frozen parameters to bf16; they need no fp32 master. A score head of which a copy is trained is left as it
    is, because it is copied later."""
    for name, parameter in module.named_parameters():
        if not parameter.requires_grad and parameter.is_floating_point() and ".original_module." not in name:
            parameter.data = parameter.data.to(torch.bfloat16)


def set_head(module: PackedModel, weight: Tensor | None) -> None:
    """Set the score head's weight, if it was drawn, and update the copy that is trained next to adapters."""
    head = getattr(module.inner, HEAD)
    copies = getattr(head, "modules_to_save", None)
    original = head if copies is None else head.original_module
    with torch.no_grad():
        if weight is not None:
            keep_shard(weight, original.weight)
        for copied in (copies or {}).values():
            copied.weight.copy_(original.weight)


def _is_converted(model: nn.Module) -> bool:
    """Whether transformers converts this family's stored tensors."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter

    return any(isinstance(entry, WeightConverter) for entry in get_model_conversion_mapping(model, None, None))


def _untie_different(model: nn.Module, files: WeightFiles) -> None:
    """Untie weights for which the files have two different tensors, like Hugging Face's loader."""
    for target, source in list(model.all_tied_weights_keys.items()):
        if target in files and source in files and not files.same(target, source):
            place, _, name = target.rpartition(".")
            setattr(model.get_submodule(place), name, nn.Parameter(torch.empty_like(model.get_parameter(source))))
            del model.all_tied_weights_keys[target]


def _stored_names(model: nn.Module, files: WeightFiles) -> dict[str, str]:
    """Names in the files of all tensors with matching shapes, under their own name or that of a tied tensor."""
    aliases: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        aliases.setdefault(id(parameter), []).append(name)
    stored = {}
    for name in model.state_dict():
        tensor = _tensor(model, name)
        key = next((key for key in (name, *aliases.get(id(tensor), [])) if key in files), None)
        if key is not None and files.shape(key) == tuple(tensor.shape):
            stored[name] = key
    return stored


def _tensor(model: nn.Module, name: str) -> Tensor:
    place, _, leaf = name.rpartition(".")
    return getattr(model.get_submodule(place), leaf)


def _compute_buffers(model: nn.Module) -> None:
    """Compute buffers that are not in the files, such as rotary frequencies, from the configuration."""
    for parameter in model.parameters():
        parameter._is_hf_initialized = True  # so that parameters are not initialized
    with preserve_rng_state(), torch.no_grad():
        for module in model.modules():
            if module._non_persistent_buffers_set:
                model._init_weights(module)


def _read_generation_config(model: nn.Module, pretrain: str) -> None:
    """Read generation_config.json if the model has one, like from_pretrained."""
    from transformers import GenerationConfig

    if not model.can_generate():
        return
    try:
        with hub_or_cache() as reachable:
            model.generation_config = GenerationConfig.from_pretrained(pretrain, local_files_only=not reachable)
    except (OSError, TypeError):
        pass


# ---- saving


FILE_BYTES = 2 * 10**9
DTYPES = {
    **{torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"},
    **{torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8"},
    **{torch.uint8: "U8", torch.bool: "BOOL"},
}


class SafetensorsWriter:
    """Writes a safetensors file tensor by tensor: shapes are given first, contents one by one."""

    def __init__(self, path: Path, tensors: dict[str, Tensor]):
        """`tensors`: names, dtypes and shapes in the order of writing; they may be meta tensors."""
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name, tensor in tensors.items():
            start, end = end, end + tensor.nbytes
            header[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        self._expected = list(tensors)
        self._path, self._file = path, path.open("wb")
        try:
            self._file.write(len(text).to_bytes(8, "little") + text)
        except OSError:
            self.give_up()
            raise

    def write(self, name: str, tensor: Tensor) -> None:
        assert name == self._expected.pop(0), name
        self._file.write(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())

    def close(self) -> None:
        """Complete the file and flush it to disk."""
        assert not self._expected, self._expected
        self._file.close()
        flush(self._path)

    def give_up(self) -> None:
        with suppress(OSError):  # closing flushes the buffer, which fails again
            self._file.close()


class ShardedWriter:
    """Writes the weights of a sharded model, each file by one process."""

    def __init__(self, model: PackedModel, mesh: Mesh, *, bf16: bool, head: str):
        """`head`: the name of a score head in the files."""
        reshard_model(model)
        self.model, self.mesh = model.inner, mesh
        self.stored = HFWeights(model.inner, bf16=bf16, head=head)
        self.files = list(self._files())
        count = len(self.files)
        self.names = [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
        if count == 1:
            self.names = [SINGLE]

    def write(self, folder: Path | None) -> None:
        """Write the files. Every process must call it, and all raise if one process's disk fails. `folder`: only rank
        0's value counts, which has created it; None: nothing is written."""
        peers = self.mesh.all
        place = peers.gather(None if folder is None else str(folder))[0]
        if place is None:
            return
        # Processes on other machines may not see the folder; rank 0, which created it, does.
        writers = [rank for rank, sees in enumerate(peers.gather(Path(place).is_dir())) if sees]
        problem = None
        for number, groups in enumerate(self.files):
            mine = writers[number % len(writers)] == peers.rank
            error = self._write_file(Path(place) / self.names[number] if mine and problem is None else None, groups)
            problem = problem or error
        if failure := next((found for found in peers.gather(problem) if found), None):
            raise OSError(*failure)
        if len(self.files) > 1 and peers.is_rank_zero:
            self._write_index(Path(place))

    def _write_file(self, path: Path | None, groups: list[Group]) -> tuple[int, str] | None:
        """Gather all tensors of a file and, if `path` is given, write them; returns the disk error, if any."""
        problem: tuple[int, str] | None = None

        def attempt(write: Callable[..., Any], *arguments: Any) -> Any:
            nonlocal problem
            try:
                return write(*arguments)
            except OSError as error:
                problem = (error.errno or 0, error.strerror or str(error))

        shapes = {name: tensor for _, after in groups for name, tensor in after.items()}
        writer: Any = None if path is None else attempt(SafetensorsWriter, path, shapes)
        for group in groups:
            tensors = self.stored.read(group, Tensor.cpu if writer is not None else lambda _: None)
            for name in group[1] if writer is not None else ():
                attempt(writer.write, name, tensors.pop(name))
                if problem:
                    writer.give_up()
                    writer = None
                    break
        if writer is not None:
            attempt(writer.close)
        return problem

    def _files(self) -> Iterator[list[Group]]:
        file: list[Group] = []
        size = 0
        for names, after in self.stored.groups:
            added = sum(tensor.nbytes for tensor in after.values())
            if file and size + added > FILE_BYTES:
                yield file
                file, size = [], 0
            file.append((names, after))
            size += added
        yield file

    def _write_index(self, folder: Path) -> None:
        places = {name: file for file, groups in zip(self.names, self.files) for _, after in groups for name in after}
        size = sum(tensor.nbytes for groups in self.files for _, after in groups for tensor in after.values())
        count = sum(parameter.numel() for parameter in self.model.parameters())
        metadata = {"total_parameters": count, "total_size": size}
        content = json.dumps({"metadata": metadata, "weight_map": places}, indent=2, sort_keys=True)
        (folder / INDEX).write_text(f"{content}\n")


def write_description(model: nn.Module, folder: Path, dtype: torch.dtype) -> None:
    """Write the configurations, and the code of a model with custom code."""
    from transformers.dynamic_module_utils import custom_object_save

    model.config.dtype = str(dtype).removeprefix("torch.")
    model.config.architectures = [type(model).__name__]
    if model.is_remote_code():
        custom_object_save(model, folder, config=model.config)
    model.config.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)
