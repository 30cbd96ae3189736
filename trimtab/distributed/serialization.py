"""Messages between processes: values as JSON followed by raw numbers, and length-prefixed frames.

`Serializer` turns values into bytes. Unpacking never runs code:

    length of the JSON (8 bytes) | the JSON | raw numbers of tensors, arrays and long lists, at offsets in the JSON

It supports plain values, lists, tuples, dicts, paths, bytes, dates, tensors, arrays, and the dataclasses and exceptions
that it was created with. A list of one kind of dataclass is stored as columns.

A byte stream carries frames: a length and a message. `FrameDecoder` splits a stream into messages, and `MessageSocket`
is a non-blocking socket for them. The length has the format of `multiprocessing.connection.Connection`, which can be
used at the other end.

This module imports torch and numpy only when one of their values occurs: sandbox workers start without them.
"""

import itertools
import json
import socket
import struct
import sys
from array import array
from collections.abc import Callable, Sequence
from dataclasses import fields
from datetime import date, datetime, time
from decimal import Decimal
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor


RAW_NUMBERS = 8  # lists of at least this many numbers are stored raw
NUMBERS = {int: "q", float: "d"}  # type codes of the array module
TIMES: dict[str, Any] = {kind.__name__: kind for kind in (datetime, date, time)}
ALIGNMENT = 16
LENGTH_BYTES = 8


class NotSerializable(TypeError):
    """A value of an unsupported type."""


class Serializer:
    """Packs values into bytes and unpacks them; `records`: the supported dataclasses and exceptions."""

    def __init__(self, *records: type):
        self._records = {record.__name__: record for record in records}
        self._readers: dict[str, Callable[[Any, memoryview], Any]] = {
            "tuple": lambda content, raw: tuple(self._read(content, raw)),
            "map": lambda content, raw: {name: self._read(value, raw) for name, value in content.items()},
            "pairs": lambda content, raw: {self._read(k, raw): self._read(v, raw) for k, v in content},
            "path": lambda content, raw: Path(content),
            "bytes": lambda content, raw: _slice(raw, *content).tobytes(),
            "when": lambda content, raw: TIMES[content[0]].fromisoformat(content[1]),
            "decimal": lambda content, raw: Decimal(content),
            "tensor": lambda content, raw: _read_tensor(raw, *content),
            "array": lambda content, raw: _read_array(raw, *content),
            "numbers": lambda content, raw: _read_numbers(raw, *content),
            "ragged": self._read_ragged,
            "rows": self._read_rows,
            "record": self._read_record,
            "error": self._read_error,
        }

    def pack(self, value: Any) -> bytearray:
        raw = _RawParts()
        header = json.dumps(self._plain(value, raw), separators=(",", ":")).encode()
        start = _aligned(LENGTH_BYTES + len(header))
        message = bytearray(start + raw.size)
        message[:LENGTH_BYTES] = len(header).to_bytes(LENGTH_BYTES, "little")
        message[LENGTH_BYTES : LENGTH_BYTES + len(header)] = header
        with memoryview(message) as view:  # so that raw numbers are copied once
            for place, part in raw.parts:
                view[start + place : start + place + len(part)] = part
        return message

    def unpack(self, message: "bytes | bytearray | np.ndarray") -> Any:
        """The value of a message. Its tensors and arrays are views of the message."""
        view = memoryview(message)
        end = LENGTH_BYTES + int.from_bytes(view[:LENGTH_BYTES], "little")
        return self._read(json.loads(view[LENGTH_BYTES:end].tobytes()), view[_aligned(end) :])

    # ---- writing

    def _plain(self, value: Any, raw: "_RawParts") -> Any:
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
        if isinstance(value, _class_if_imported("torch", "Tensor")):
            return {"tensor": _tensor_parts(value, raw)}
        if isinstance(value, _class_if_imported("numpy", "ndarray")):
            if value.dtype.kind not in "biufc":
                raise NotSerializable(f"an array of {value.dtype} is not serialized")
            return {"array": [value.dtype.name, list(value.shape), raw.add(value.tobytes())]}
        if isinstance(value, Path):
            return {"path": str(value)}
        if kind is bytes:
            return {"bytes": [raw.add(value), len(value)]}
        if kind in TIMES.values():
            return {"when": [kind.__name__, value.isoformat()]}
        if kind is Decimal:
            return {"decimal": str(value)}
        if self._records.get(kind.__name__) is not kind:
            raise NotSerializable(f"{kind.__name__} is not among the types that this serializer knows")
        if isinstance(value, Exception):
            return {"error": [kind.__name__, self._plain(value.args, raw), self._plain(vars(value), raw)]}
        return {"record": [kind.__name__, {f.name: self._plain(getattr(value, f.name), raw) for f in fields(value)}]}

    def _plain_list(self, values: list, raw: "_RawParts") -> Any:
        kinds = set(map(type, values))
        if len(kinds) != 1 or len(values) == 1:
            return self._plain_items(values, raw)
        (kind,) = kinds
        if kind in NUMBERS:
            return values if (numbers := _raw_numbers(values, raw)) is None else {"numbers": numbers}
        if kind is list:  # typically lists of token ids
            numbers = _raw_numbers([*itertools.chain.from_iterable(values)], raw)
            if numbers is not None:
                return {"ragged": [numbers, self._plain_list([len(value) for value in values], raw)]}
        elif self._records.get(kind.__name__) is kind and not issubclass(kind, Exception):
            names = [f.name for f in fields(cast(Any, kind))]
            columns = {name: self._plain_list([getattr(v, name) for v in values], raw) for name in names}
            return {"rows": [kind.__name__, columns]}
        return self._plain_items(values, raw)

    def _plain_items(self, values: Sequence, raw: "_RawParts") -> list:
        return [self._plain(value, raw) for value in values]

    # ---- reading

    def _read(self, content: Any, raw: memoryview) -> Any:
        if type(content) is list:
            return [self._read(item, raw) for item in content]
        if type(content) is not dict:
            return content
        ((kind, content),) = content.items()
        return self._readers[kind](content, raw)

    def _read_record(self, content: Any, raw: memoryview) -> Any:
        name, values = content
        return self._records[name](**{field: self._read(value, raw) for field, value in values.items()})

    def _read_rows(self, content: Any, raw: memoryview) -> list:
        name, columns = content
        read = [self._read(column, raw) for column in columns.values()]
        return [self._records[name](**dict(zip(columns, row))) for row in zip(*read, strict=True)]

    def _read_ragged(self, content: Any, raw: memoryview) -> list[list]:
        numbers = _read_numbers(raw, *content[0])
        ends = [0, *itertools.accumulate(self._read(content[1], raw))]
        return [numbers[start:end] for start, end in itertools.pairwise(ends)]

    def _read_error(self, content: Any, raw: memoryview) -> Exception:
        name, arguments, more = content
        error = self._records[name](*self._read(arguments, raw))
        vars(error).update(self._read(more, raw))
        return error


# ---- raw numbers of tensors, arrays and long lists


class _RawParts:
    """Collects the raw parts of a message and their aligned offsets."""

    def __init__(self) -> None:
        self.size = 0
        self.parts: list[tuple[int, bytes | memoryview]] = []

    def add(self, part: bytes | memoryview) -> int:
        """Add a part and return its offset."""
        place = self.size
        self.parts.append((place, part))
        self.size = _aligned(place + len(part))
        return place


def _class_if_imported(module: str, name: str) -> Any:
    """A class for isinstance, without importing its module: if it was not imported, no instance can exist."""
    found = sys.modules.get(module)
    return () if found is None else getattr(found, name)


def _tensor_parts(tensor: "Tensor", raw: _RawParts) -> list:
    import torch

    flat = tensor.detach().cpu().contiguous().reshape(-1)
    part = memoryview(flat.view(torch.uint8).numpy()) if len(flat) else b""
    return [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), raw.add(part)]


def _raw_numbers(values: list, raw: _RawParts) -> list | None:
    """Store a long list of 64-bit integers or of floats raw; None for any other list."""
    kinds = set(map(type, values))
    if len(values) < RAW_NUMBERS or len(kinds) != 1 or (code := NUMBERS.get(kinds.pop())) is None:
        return None
    try:
        return [code, len(values), raw.add(memoryview(array(code, values)).cast("B"))]
    except OverflowError:
        return None


def _read_tensor(raw: memoryview, name: str, shape: list[int], place: int) -> "Tensor":
    import torch

    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype), f"{name} is no dtype"
    part = _slice(raw, place, prod(shape) * dtype.itemsize)
    return torch.frombuffer(part, dtype=dtype).reshape(shape) if len(part) else torch.empty(shape, dtype=dtype)


def _read_array(raw: memoryview, name: str, shape: list[int], place: int) -> "np.ndarray":
    import numpy as np

    dtype = np.dtype(name)
    part = _slice(raw, place, prod(shape) * dtype.itemsize)
    return np.frombuffer(part, dtype=dtype).reshape(shape) if len(part) else np.empty(shape, dtype=dtype)


def _read_numbers(raw: memoryview, code: Literal["q", "d"], count: int, place: int) -> list:
    return _slice(raw, place, count * 8).cast(code).tolist()


def _slice(raw: memoryview, place: int, size: int) -> memoryview:
    assert place >= 0 and size >= 0 and place + size <= len(raw), "a message that ends early"
    return raw[place : place + size]


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


# ---- frames: messages in a stream of bytes

LARGEST_MESSAGE = 2**28  # accepted by a receiver; messages sent may be larger, such as all answers of a batch
READ_BYTES = 2**20
LENGTH, LONG_LENGTH = struct.Struct("!i"), struct.Struct("!iQ")


class MessageTooLarge(Exception):
    """A frame announces a message above the limit."""


def frame(*parts: bytes) -> bytes:
    """One message of these parts, prefixed with its length."""
    length = sum(map(len, parts))
    return b"".join((LENGTH.pack(length) if length < 2**31 else LONG_LENGTH.pack(-1, length), *parts))


class FrameDecoder:
    """Splits a byte stream, received in pieces of any size, into messages."""

    def __init__(self, largest: int = LARGEST_MESSAGE):
        self.largest = largest
        self._buffer = bytearray()  # bytes of the incomplete message

    def feed(self, data: bytes) -> list[bytes]:
        """Add received bytes; returns the messages completed by them."""
        self._buffer += data
        messages, start, end = [], 0, len(self._buffer)
        while end - start >= LENGTH.size:
            (length,) = LENGTH.unpack_from(self._buffer, start)
            if not 0 <= length <= self.largest:
                raise MessageTooLarge
            stop = start + LENGTH.size + length
            if stop > end:
                break
            messages.append(bytes(self._buffer[start + LENGTH.size : stop]))
            start = stop
        del self._buffer[:start]
        return messages


class MessageSocket:
    """A non-blocking socket that sends and receives whole messages."""

    def __init__(self, end: socket.socket):
        end.setblocking(False)
        self._end = end
        self._decoder, self._outgoing = FrameDecoder(), bytearray()

    def fileno(self) -> int:
        return self._end.fileno()

    @property
    def has_more(self) -> bool:
        """Whether there is unsent data."""
        return bool(self._outgoing)

    def send(self, message: bytes) -> None:
        """Send a message now or, if the socket's buffer is full, in a later `flush`."""
        self._outgoing += frame(message)
        self.flush()

    def flush(self) -> None:
        try:
            while self._outgoing:
                with memoryview(self._outgoing) as view:
                    sent = self._end.send(view)
                del self._outgoing[:sent]
        except BlockingIOError:
            return
        except OSError:  # `receive` reports that the other end is closed
            self._outgoing.clear()

    def receive(self) -> list[bytes]:
        """All messages received so far. EOFError: the other end is closed; MessageTooLarge: from the decoder."""
        ended, messages = False, []
        try:
            while len(chunk := self._end.recv(READ_BYTES)):
                messages += self._decoder.feed(chunk)
            ended = True
        except BlockingIOError:
            pass
        except OSError:
            ended = True
        if ended and not messages:
            raise EOFError
        return messages
