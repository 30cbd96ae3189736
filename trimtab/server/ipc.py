"""What the process of an engine and those of its HTTP side write to each other: small heads, raw numbers behind them.

length (4 bytes) | kind (1) | number of the request (8) | what the kind says
"""

import asyncio
import dataclasses
import json
import struct
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, cast, get_args

import numpy as np

from trimtab.errors import UserError
from trimtab.rollout.sampling import SamplingParams
from trimtab.rollout.trajectory import Alternatives, Finish, Rollout
from trimtab.server.http import ServerClosing
from trimtab.server.request_queue import CompletionRequest, EngineFailed, Overloaded

HEAD = struct.Struct("<IBQ")
ASK = struct.Struct("<?qIII")  # has a seed, seed, number, answers, bytes of the setting
ROLLOUT = struct.Struct("<BII")  # finish, tokens, likeliest others at each place
SIZE = struct.Struct("<I")

# To the engine's process.
ASKED, GONE, PASSED_ON, COUNTED = 0, 1, 2, 3
# From it.
DRAWN, FAILED, ANSWERED, DRAIN, END = 4, 5, 6, 7, 8

FINISHES = get_args(Finish)
ERRORS: dict[str, type[Exception]] = {
    kind.__name__: kind for kind in (EngineFailed, Overloaded, ServerClosing, UserError)
}
USUAL = SamplingParams()
LONGEST_KNOWN = 2**10  # bytes of a setting that is remembered; a bias may name every token
FIELDS = [field.name for field in dataclasses.fields(SamplingParams)]


def letter(kind: int, number: int, *parts: bytes) -> bytes:
    content = b"".join(parts)
    return HEAD.pack(HEAD.size - SIZE.size + len(content), kind, number) + content


class Post(asyncio.Protocol):
    """One end of a connection; what comes is `read`."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self._come = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # other loops have transports of their own

    def data_received(self, data: bytes) -> None:
        come = self._come
        come += data
        place, letters = 0, []
        while len(come) - place >= HEAD.size:
            length, kind, number = HEAD.unpack_from(come, place)
            end = place + SIZE.size + length
            if len(come) < end:
                break
            letters.append((kind, number, bytes(come[place + HEAD.size : end])))
            place = end
        del come[:place]
        if letters:
            self.read(letters)

    def read(self, come: Iterable[tuple[int, int, bytes]]) -> None:
        """Kinds, numbers, contents."""
        raise NotImplementedError

    def send(self, *letters: bytes) -> None:
        """Nobody reads it any more where the connection is lost."""
        if self.transport is not None and not self.transport.is_closing():
            self.transport.write(b"".join(letters))


# ---- what is asked for


def turn_letter(number: int, turn: CompletionRequest) -> bytes:
    setting = _written(turn.sampling)
    seed = 0 if turn.seed is None else turn.seed
    head = ASK.pack(turn.seed is not None, seed, turn.number, turn.answers, len(setting))
    return letter(ASKED, number, head, setting, np.array(turn.prompt_ids, dtype=np.int32).tobytes())


def read_turn(content: bytes) -> CompletionRequest:
    has_seed, seed, number, answers, size = ASK.unpack_from(content)
    place = ASK.size + size
    ids = np.frombuffer(content, dtype=np.int32, offset=place).tolist()
    return CompletionRequest(
        ids, _read_setting(content[ASK.size : place]), answers, None, seed if has_seed else None, number
    )


def _written(sampling: SamplingParams) -> bytes:
    values = [(name, getattr(sampling, name)) for name in FIELDS]
    return json.dumps({name: value for name, value in values if value != getattr(USUAL, name)}).encode()


def _read_setting(written: bytes) -> SamplingParams:
    return _known_setting(written) if len(written) <= LONGEST_KNOWN else _setting(written)


@lru_cache(1024)  # most requests have the same few
def _known_setting(written: bytes) -> SamplingParams:
    return _setting(written)


def _setting(written: bytes) -> SamplingParams:
    found: dict[str, Any] = json.loads(written)
    for name, value in found.items():
        if isinstance(value, list):
            found[name] = tuple(value)
        elif isinstance(value, dict):  # whose names are tokens
            found[name] = {int(token): bias for token, bias in value.items()}
    return SamplingParams(**found)


# ---- what has become of it


def drawn_letter(number: int, rollouts: Sequence[Rollout]) -> bytes:
    parts: list[bytes] = []
    for rollout in rollouts:
        likely = rollout.alternatives
        others = 0 if likely is None else likely.tokens.shape[1]
        parts.append(ROLLOUT.pack(FINISHES.index(rollout.finish), len(rollout.tokens), others))
        parts += [rollout.tokens.tobytes(), np.asarray(rollout.log_probs, np.float32).tobytes()]
        if likely is not None:
            parts += [np.asarray(likely.tokens, np.int32).tobytes(), np.asarray(likely.log_probs, np.float32).tobytes()]
    return letter(DRAWN, number, *parts)


def read_rollouts(content: bytes, prompt_ids: list[int]) -> list[Rollout]:
    rollouts: list[Rollout] = []
    place = 0

    def numbers(kind: type, count: int) -> np.ndarray:
        nonlocal place
        found = np.frombuffer(content, dtype=kind, count=count, offset=place)
        place += found.nbytes
        return found

    while place < len(content):
        finish, count, others = ROLLOUT.unpack_from(content, place)
        place += ROLLOUT.size
        tokens, log_probs = numbers(np.int32, count), numbers(np.float32, count)
        rollout = Rollout(0, len(rollouts), prompt_ids, tokens, log_probs, FINISHES[finish])
        if others:
            shape = count, others
            likely = (
                numbers(np.int32, count * others).reshape(shape),
                numbers(np.float32, count * others).reshape(shape),
            )
            rollout.alternatives = Alternatives(*likely)
        rollouts.append(rollout)
    return rollouts


def failed_letter(number: int, error: BaseException) -> bytes:
    return letter(FAILED, number, json.dumps([type(error).__name__, str(error)]).encode())


def read_error(content: bytes) -> Exception:
    name, words = json.loads(content)
    return ERRORS.get(name, RuntimeError)(words)


# ---- requests that are answered as a whole in the engine's process, and their replies


def whole_letter(kind: int, number: int, about: dict[str, Any], content: bytes) -> bytes:
    head = json.dumps(about).encode()
    return letter(kind, number, SIZE.pack(len(head)), head, content)


def read_whole(content: bytes) -> tuple[dict[str, Any], bytes]:
    (size,) = SIZE.unpack_from(content)
    place = SIZE.size + size
    return json.loads(content[SIZE.size : place]), content[place:]
