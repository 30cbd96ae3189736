"""Write a sharded model as a Hugging Face folder that no process holds whole.

Tensors are gathered one after another, every process taking part, and written by the process that the file belongs to;
the others free them. Files have at most FILE_BYTES and are dealt out in turn to the processes that see the folder, so a
small model is one file of the first process, and all processes write a large one.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trimtab.distributed.fsdp import reshard_model
from trimtab.distributed.mesh import Mesh
from trimtab.files import flush
from trimtab.models.packed import PackedModel
from trimtab.models.pretrained import INDEX, SINGLE
from trimtab.models.weight_export import Group, HFWeights

FILE_BYTES = 2 * 10**9
DTYPES = {
    **{torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"},
    **{torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8"},
    **{torch.uint8: "U8", torch.bool: "BOOL"},
}


class SafetensorsWriter:
    """A safetensors file that is written tensor by tensor: shapes are known beforehand, contents come one by one."""

    def __init__(self, path: Path, tensors: dict[str, Tensor]):
        """`tensors`: what will be written, in this order; they need no contents."""
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
        """What was written is on the disk when this returns."""
        assert not self._expected, self._expected
        self._file.close()
        flush(self._path)

    def give_up(self) -> None:
        with suppress(OSError):  # closing writes what is left over, which fails as before
            self._file.close()


class ShardedWriter:
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
        """Every process must call it, and each raises what went wrong with the disk of any. `folder`: as the first
        process says, which has made it; where that says None nothing is written."""
        peers = self.mesh.all
        place = peers.gather(None if folder is None else str(folder))[0]
        if place is None:
            return
        # Processes of another machine may not; the first one, which made it, does.
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
        """Gather everything in a file; write it if it has a path, and return what the disk says."""
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
    """Write what a folder has beside weights: the configurations, and the code of a model that brings its own."""
    from transformers.dynamic_module_utils import custom_object_save

    model.config.dtype = str(dtype).removeprefix("torch.")
    model.config.architectures = [type(model).__name__]
    if model.is_remote_code():
        custom_object_save(model, folder, config=model.config)
    model.config.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)
