"""Write a split model as a Hugging Face folder that no process holds whole.

Tensors are gathered one after another, every process taking part, and written by the process that the file belongs to;
the others let go of them. Files have at most FILE_BYTES and are dealt out in turn to those that see the folder, so a
small model is one file of the first process, and a large one is written by all. Kinds of models that are stored in
another form (Mixtral's experts) are gathered layer by layer, and turned back as Hugging Face does.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from trimtab.distributed.mesh import Mesh
from trimtab.distributed.sharding import split_again, whole
from trimtab.models.packed import PackedModel
from trimtab.models.reward import HEAD, renamed
from trimtab.models.safetensors_stream import SafetensorsStream

FILE_BYTES = 2 * 10**9
Group = tuple[list[str], dict[str, Tensor]]
"""Names of tensors that are turned back together, and what becomes of them: on meta, in the order of the file."""


class SplitWeights:
    def __init__(self, model: PackedModel, mesh: Mesh, *, bf16: bool, head: str):
        """`head`: what a score head is to be called."""
        split_again(model)
        self.model, self.mesh, self.bf16, self.head = model.inner, mesh, bf16, head
        self.state = _state(model.inner)
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
                stream = SafetensorsStream(path, {name: t for _, after in groups for name, t in after.items()})
            except OSError as error:
                problem = (error.errno or 0, error.strerror or str(error))
        for names, after in groups:
            gathered = {name: self._whole(name, keep=stream is not None) for name in names}
            if stream is None:
                continue
            turned = self._turned_back({name: tensor for name, tensor in gathered.items() if tensor is not None})
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

    def _whole(self, name: str, *, keep: bool) -> Tensor | None:
        tensor = whole(self.state[name])
        return tensor.to("cpu", self._dtype(tensor)) if keep else None

    def _dtype(self, tensor: Tensor) -> torch.dtype:
        return torch.bfloat16 if self.bf16 and tensor.is_floating_point() else tensor.dtype

    def _turned_back(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        from transformers.core_model_loading import revert_weight_conversion

        return {renamed(name, HEAD, self.head): t for name, t in revert_weight_conversion(self.model, tensors).items()}

    def _files(self) -> Iterator[list[Group]]:
        file: list[Group] = []
        size = 0
        for names in self._groups():
            shapes = {name: self.state[name] for name in names}
            hollow = {name: torch.empty(t.shape, dtype=self._dtype(t), device="meta") for name, t in shapes.items()}
            after = self._turned_back(hollow)
            added = sum(tensor.nbytes for tensor in after.values())
            if file and size + added > FILE_BYTES:
                yield file
                file, size = [], 0
            file.append((names, after))
            size += added
        yield file

    def _groups(self) -> list[list[str]]:
        if not self._is_converted():
            return [[name] for name in self.state]
        groups: dict[str, list[str]] = {}
        for name in self.state:
            layer = re.match(r".*?\.\d+\.", name)
            groups.setdefault(layer[0] if layer else name, []).append(name)
        return list(groups.values())

    def _is_converted(self) -> bool:
        """Whether turning back makes other tensors, and not only other names."""
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter

        conversions = getattr(self.model, "_weight_conversions", None)
        if conversions is None:
            conversions = get_model_conversion_mapping(self.model, add_legacy=False)
        return any(isinstance(conversion, WeightConverter) for conversion in conversions)

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


def _state(model: nn.Module) -> dict[str, Tensor]:
    """What is stored: each tensor once, and nothing that the model says is not stored."""
    tied = [
        target
        for target, source in model.all_tied_weights_keys.items()
        if model.get_parameter(target) is model.get_parameter(source)
    ]
    left_out = {*tied, *(model._keys_to_ignore_on_save or ())}
    return {name: tensor for name, tensor in model.state_dict().items() if name not in left_out}
