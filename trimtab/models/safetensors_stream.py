"""A safetensors file that is written tensor by tensor: shapes are known beforehand, contents come one after another."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trimtab.files import flush

NAMES = {
    **{torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"},
    **{torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8"},
    **{torch.uint8: "U8", torch.bool: "BOOL"},
}


class SafetensorsStream:
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
