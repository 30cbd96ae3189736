"""What travels between processes: JSON, and raw numbers behind it. Nothing that arrives can run code.

    length of the JSON (8 bytes) | the JSON | the numbers of tensors, arrays and long lists, each where the JSON says

Plain values, lists, tuples, dicts, paths, bytes, dates, tensors and arrays travel as they are; dataclasses and
exceptions if they are among the records that a wire was made for. A list of one kind of record travels as columns.
"""

import itertools
import json
from array import array
from collections.abc import Callable, Sequence
from dataclasses import fields
from datetime import date, datetime, time
from decimal import Decimal
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

LONG = 8  # a list of so many numbers is cheaper as raw ones
NUMBERS = {int: ("q", torch.int64), float: ("d", torch.float64)}
TIMES: dict[str, Any] = {kind.__name__: kind for kind in (datetime, date, time)}
ALIGNMENT = 16
LENGTH_BYTES = 8


class CannotTravel(TypeError):
    """A value of a kind that is sent to no other process."""


class Wire:
    def __init__(self, *records: type):
        self._records = {record.__name__: record for record in records}
        self._readers: dict[str, Callable[[Any, Tensor], Any]] = {
            "tuple": lambda content, raw: tuple(self._read(content, raw)),
            "map": lambda content, raw: {name: self._read(value, raw) for name, value in content.items()},
            "pairs": lambda content, raw: {self._read(k, raw): self._read(v, raw) for k, v in content},
            "path": lambda content, raw: Path(content),
            "bytes": lambda content, raw: _take(content, raw).numpy().tobytes(),
            "when": lambda content, raw: TIMES[content[0]].fromisoformat(content[1]),
            "decimal": lambda content, raw: Decimal(content),
            "tensor": lambda content, raw: _take(content, raw),
            "array": lambda content, raw: _take(content, raw).numpy(),
            "numbers": lambda content, raw: _take(content, raw).tolist(),
            "ragged": self._read_ragged,
            "rows": self._read_rows,
            "record": self._read_record,
            "error": self._read_error,
        }

    def pack(self, value: Any) -> Tensor:
        """The value as a row of bytes."""
        raw = _Raw()
        header = json.dumps(self._plain(value, raw), separators=(",", ":")).encode()
        start = _aligned(LENGTH_BYTES + len(header))
        message = np.zeros(start + raw.size, dtype=np.uint8)
        message[:LENGTH_BYTES] = np.frombuffer(len(header).to_bytes(LENGTH_BYTES, "little"), dtype=np.uint8)
        message[LENGTH_BYTES : LENGTH_BYTES + len(header)] = np.frombuffer(header, dtype=np.uint8)
        for place, numbers in raw.parts:
            message[start + place : start + place + len(numbers)] = numbers
        return torch.from_numpy(message)

    def unpack(self, message: Tensor) -> Any:
        """The value again. Its tensors lie in the message itself."""
        end = LENGTH_BYTES + int.from_bytes(message[:LENGTH_BYTES].numpy().tobytes(), "little")
        header = message[LENGTH_BYTES:end].numpy().tobytes()
        return self._read(json.loads(header), message[_aligned(end) :])

    # ---- writing

    def _plain(self, value: Any, raw: "_Raw") -> Any:
        kind = type(value)
        if value is None or kind in (str, int, float, bool):
            return value
        if kind is list:
            return self._plain_list(value, raw)
        if kind is tuple:
            return {"tuple": self._plain_items(value, raw)}
        if kind is dict:
            if all(type(name) is str for name in value):
                return {"map": {name: self._plain(item, raw) for name, item in value.items()}}
            return {"pairs": [[self._plain(k, raw), self._plain(v, raw)] for k, v in value.items()]}
        if isinstance(value, Tensor):
            return {"tensor": raw.add(value.detach())}
        if isinstance(value, np.ndarray):
            return {"array": raw.add(torch.from_numpy(np.array(value, order="C")))}
        if isinstance(value, Path):
            return {"path": str(value)}
        if kind is bytes:
            return {"bytes": raw.add(torch.from_numpy(np.array(bytearray(value), dtype=np.uint8)))}
        if kind in TIMES.values():
            return {"when": [kind.__name__, value.isoformat()]}
        if kind is Decimal:
            return {"decimal": str(value)}
        if self._records.get(kind.__name__) is not kind:
            raise CannotTravel(f"{kind.__name__} is not among what may travel")
        if isinstance(value, Exception):
            return {"error": [kind.__name__, self._plain(value.args, raw), self._plain(vars(value), raw)]}
        return {"record": [kind.__name__, {f.name: self._plain(getattr(value, f.name), raw) for f in fields(value)}]}

    def _plain_list(self, values: list, raw: "_Raw") -> Any:
        kinds = set(map(type, values))
        if len(kinds) != 1 or len(values) == 1:
            return self._plain_items(values, raw)
        (kind,) = kinds
        if kind in NUMBERS:
            return values if (numbers := _numbers(values)) is None else {"numbers": raw.add(numbers)}
        if kind is list:  # lists of token ids, most of all
            numbers = _numbers([*itertools.chain.from_iterable(values)])
            if numbers is not None:
                return {"ragged": [raw.add(numbers), self._plain_list([len(value) for value in values], raw)]}
        elif self._records.get(kind.__name__) is kind and not issubclass(kind, Exception):
            names = [f.name for f in fields(cast(Any, kind))]
            columns = {name: self._plain_list([getattr(v, name) for v in values], raw) for name in names}
            return {"rows": [kind.__name__, columns]}
        return self._plain_items(values, raw)

    def _plain_items(self, values: Sequence, raw: "_Raw") -> list:
        return [self._plain(value, raw) for value in values]

    # ---- reading

    def _read(self, content: Any, raw: Tensor) -> Any:
        if type(content) is list:
            return [self._read(item, raw) for item in content]
        if type(content) is not dict:
            return content
        ((kind, content),) = content.items()
        return self._readers[kind](content, raw)

    def _read_record(self, content: Any, raw: Tensor) -> Any:
        name, values = content
        return self._records[name](**{field: self._read(value, raw) for field, value in values.items()})

    def _read_rows(self, content: Any, raw: Tensor) -> list:
        name, columns = content
        read = [self._read(column, raw) for column in columns.values()]
        return [self._records[name](**dict(zip(columns, row))) for row in zip(*read, strict=True)]

    def _read_ragged(self, content: Any, raw: Tensor) -> list[list]:
        numbers = _take(content[0], raw).tolist()
        ends = [0, *itertools.accumulate(self._read(content[1], raw))]
        return [numbers[start:end] for start, end in itertools.pairwise(ends)]

    def _read_error(self, content: Any, raw: Tensor) -> Exception:
        name, arguments, more = content
        error = self._records[name](*self._read(arguments, raw))
        vars(error).update(self._read(more, raw))
        return error


class _Raw:
    """The numbers of a message, one after another."""

    def __init__(self):
        self.size = 0
        self.parts: list[tuple[int, np.ndarray]] = []

    def add(self, tensor: Tensor) -> list:
        """Where they will be, and how to read them."""
        flat = tensor.cpu().contiguous().reshape(-1)
        numbers = (flat.view(torch.uint8) if len(flat) else flat.to(torch.uint8)).numpy()
        place = self.size
        self.parts.append((place, numbers))
        self.size = _aligned(place + len(numbers))
        return [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), place]


DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}


def _numbers(values: list) -> Tensor | None:
    """A long list of nothing but integers of 64 bits, or nothing but floats."""
    kinds = set(map(type, values))
    if len(values) < LONG or len(kinds) != 1 or (kind := NUMBERS.get(kinds.pop())) is None:
        return None
    code, dtype = kind
    try:
        return torch.frombuffer(array(code, values), dtype=dtype)  # twice as fast as a tensor of a list
    except OverflowError:
        return None


def _take(content: list, raw: Tensor) -> Tensor:
    name, shape, place = content
    dtype = DTYPES[name]
    count = int(np.prod(shape, dtype=np.int64))
    size = count * dtype.itemsize
    assert place >= 0 and place + size <= len(raw), "a message that ends early"
    return raw[place : place + size].view(dtype).reshape(shape)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
