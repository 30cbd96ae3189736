"""A safetensors file that is written tensor by tensor: shapes are known beforehand, contents come one after another."""

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trimtab.distributed.fsdp import split_again
from trimtab.distributed.mesh import Mesh
from trimtab.files import flush
from trimtab.models.packed import PackedModel
from trimtab.models.weight_export import Group, HFWeights

NAMES = {
    **{torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"},
    **{torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8"},
    **{torch.uint8: "U8", torch.bool: "BOOL"},
}


class SafetensorsWriter:
    def __init__(self, path: Path, tensors: dict[str, Tensor]):
        """`tensors`: what will be written, in this order; they need no contents."""
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name, tensor in tensors.items():
            start, end = end, end + tensor.nbytes
            header[name] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
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


# ---- Write a split model as a Hugging Face folder that no process holds whole. Tensors are gathered one after
# another, every process taking part, and written by the process that the file belongs to; the others let go of
# them. Files have at most FILE_BYTES and are dealt out in turn to those that see the folder, so a small model is
# one file of the first process, and a large one is written by all. Kinds of models that are stored in another
# form (Mixtral's experts) are gathered layer by layer, and turned back as Hugging Face does.


FILE_BYTES = 2 * 10**9


class ShardedWriter:
    def __init__(self, model: PackedModel, mesh: Mesh, *, bf16: bool, head: str):
        """`head`: what a score head is to be called."""
        split_again(model)
        self.model, self.mesh = model.inner, mesh
        self.stored = HFWeights(model.inner, bf16=bf16, head=head)
        self.files = list(self._files())
        count = len(self.files)
        self.names = [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
        if count == 1:
            self.names = ["model.safetensors"]

    def write(self, folder: Path | None) -> None:
        """Every process must ask, and each raises what went wrong with the disk of any. `folder`: as the first process
        says, which has made it; where that says None nothing is written."""
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
        if told := next((found for found in peers.gather(problem) if found), None):
            raise OSError(*told)
        if len(self.files) > 1 and peers.leads:
            self._write_index(Path(place))

    def _write_file(self, path: Path | None, groups: list[Group]) -> tuple[int, str] | None:
        """Gather everything in it; write it if it has a path, and tell what the disk says."""
        stream, problem = None, None
        if path is not None:
            try:
                stream = SafetensorsWriter(path, {name: t for _, after in groups for name, t in after.items()})
            except OSError as error:
                problem = (error.errno or 0, error.strerror or str(error))
        for names, after in groups:
            gathered = {name: self._gathered(name, keep=stream is not None) for name in names}
            if stream is None:
                continue
            turned = self.stored.to_hf({name: tensor for name, tensor in gathered.items() if tensor is not None})
            gathered.clear()
            try:
                for name in after:
                    stream.write(name, turned.pop(name))
            except OSError as error:
                problem = (error.errno or 0, error.strerror or str(error))
                stream.give_up()
                stream = None
        if stream is not None:
            try:
                stream.close()
            except OSError as error:
                problem = (error.errno or 0, error.strerror or str(error))
        return problem

    def _gathered(self, name: str, *, keep: bool) -> Tensor | None:
        tensor = self.stored.gathered(name)
        return tensor.cpu() if keep else None

    def _files(self) -> Iterator[list[Group]]:
        file: list[Group] = []
        size = 0
        for names, after in self.stored.groups():
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
        (folder / "model.safetensors.index.json").write_text(f"{content}\n")


def write_description(model: nn.Module, folder: Path, dtype: torch.dtype) -> None:
    """What a folder has beside weights: the configurations, and the code of a model that brings its own."""
    from transformers.dynamic_module_utils import custom_object_save

    model.config.dtype = str(dtype).removeprefix("torch.")
    model.config.architectures = [type(model).__name__]
    if model.is_remote_code():
        custom_object_save(model, folder, config=model.config)
    model.config.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)
