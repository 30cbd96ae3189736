"""IPC messages between the engine's process and the HTTP workers: binary heads with raw token ids and log-probs.

    frame: length | kind (1 byte) | number of the request (8 bytes) | content

This is the server's hot path: one message a completion each way, and no JSON but the few sampling settings that differ
from the defaults.
"""

import asyncio
import dataclasses
import json
import struct
from collections.abc import Sequence
from functools import lru_cache
from itertools import chain
from typing import Any, cast, get_args

import numpy as np

from trimtab.distributed.serialization import FrameDecoder, frame
from trimtab.errors import UserError
from trimtab.rollout.sampling import SamplingParams
from trimtab.rollout.trajectory import Finish, PromptLogprobs, TopLogprobs, Trajectory
from trimtab.server.http import Overloaded, ServerClosing
from trimtab.server.request_queue import CompletionRequest, EngineFailed

HEAD = struct.Struct("<BQ")
# Has a seed, seed, number, answers, is streamed, bytes of the sampling settings.
COMPLETION_REQUEST = struct.Struct("<?qII?I")
# Finish reason, tokens, alternatives at each token; has log-probs of the prompt, their number, alternatives at each.
ROLLOUT = struct.Struct("<BII?II")
SIZE = struct.Struct("<I")

# To the engine's process: sample a completion; cancel it; answer this HTTP request; count a request.
COMPLETE, CANCEL, FORWARD, COUNT = 0, 1, 2, 3
# To an HTTP worker: the result; the error; the HTTP response; drain; stop at once; new tokens of an answer; a part of
# the HTTP response before the last.
COMPLETED, FAILED, RESPONSE, DRAIN, STOP, PIECE, MORE = 4, 5, 6, 7, 8, 9, 10

FINISH_REASONS = (*get_args(Finish), None)
ERRORS: dict[str, type[Exception]] = {
    kind.__name__: kind for kind in (EngineFailed, Overloaded, ServerClosing, UserError)
}
DEFAULT_SAMPLING = SamplingParams()
SAMPLING_FIELDS = [field.name for field in dataclasses.fields(SamplingParams)]
LONGEST_CACHED = 2**10  # bytes of sampling settings; a logit bias may name every token
LARGEST_MESSAGE = 2**31 - 1


def encode(kind: int, number: int, *parts: bytes) -> bytes:
    """A message with its frame."""
    return frame(HEAD.pack(kind, number), *parts)


class MessageProtocol(asyncio.Protocol):
    """One end of a connection that carries IPC messages."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self._decoder = FrameDecoder(LARGEST_MESSAGE)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop has its own transport classes

    def data_received(self, data: bytes) -> None:
        for message in self._decoder.feed(data):
            kind, number = HEAD.unpack_from(message)
            self.received(kind, number, memoryview(message)[HEAD.size :])

    def received(self, kind: int, number: int, content: memoryview) -> None:
        raise NotImplementedError

    def send(self, *messages: bytes) -> None:
        """Send encoded messages; they are dropped once the connection is lost."""
        if self.transport is not None and not self.transport.is_closing():
            self.transport.write(b"".join(messages))


# ---- completion requests


def encode_request(number: int, request: CompletionRequest) -> bytes:
    values = [(name, getattr(request.sampling, name)) for name in SAMPLING_FIELDS]
    settings = json.dumps({name: value for name, value in values if value != getattr(DEFAULT_SAMPLING, name)}).encode()
    seed = 0 if request.seed is None else request.seed
    numbers = seed, request.number, request.answers, request.stream, len(settings)
    head = COMPLETION_REQUEST.pack(request.seed is not None, *numbers)
    return encode(COMPLETE, number, head, settings, np.array(request.prompt_ids, dtype=np.int32).tobytes())


def decode_request(content: memoryview) -> CompletionRequest:
    has_seed, seed, number, answers, stream, size = COMPLETION_REQUEST.unpack_from(content)
    place = COMPLETION_REQUEST.size + size
    ids = np.frombuffer(content, dtype=np.int32, offset=place).tolist()
    settings = content[COMPLETION_REQUEST.size : place].tobytes()
    sampling = _cached_sampling(settings) if size <= LONGEST_CACHED else _sampling(settings)
    return CompletionRequest(ids, sampling, answers, None, seed if has_seed else None, number, stream)


def _sampling(settings: bytes) -> SamplingParams:
    found: dict[str, Any] = json.loads(settings)
    for name, value in found.items():
        if isinstance(value, list):
            found[name] = tuple(value)
        elif isinstance(value, dict):  # a logit bias, by token ids
            found[name] = {int(token): bias for token, bias in value.items()}
    return SamplingParams(**found)


_cached_sampling = lru_cache(1024)(_sampling)  # most requests have the same few settings


# ---- results and errors


def encode_trajectories(number: int, rollouts: Sequence[Trajectory]) -> bytes:
    return encode(COMPLETED, number, *chain.from_iterable(map(_encoded, rollouts)))


def encode_piece(number: int, answer: int, piece: Trajectory) -> bytes:
    return encode(PIECE, number, SIZE.pack(answer), *_encoded(piece))


def _encoded(rollout: Trajectory) -> list[bytes]:
    before = rollout.prompt_log_probs
    scored = [] if before is None else before.log_probs
    alternatives = rollout.alternatives, None if before is None else before.alternatives
    widths = [0 if likely is None else likely.tokens.shape[1] for likely in alternatives]
    finish = FINISH_REASONS.index(rollout.finish)
    head = ROLLOUT.pack(finish, len(rollout.tokens), widths[0], before is not None, len(scored), widths[1])
    parts = [head, rollout.tokens.tobytes(), np.asarray(rollout.log_probs, np.float32).tobytes()]
    for likely in alternatives:
        if likely is not None:
            parts += [np.asarray(likely.tokens, np.int32).tobytes(), np.asarray(likely.log_probs, np.float32).tobytes()]
    return parts if before is None else [*parts, np.asarray(scored, np.float32).tobytes()]


def decode_piece(content: memoryview) -> tuple[int, Trajectory]:
    (answer,) = SIZE.unpack_from(content)
    return answer, decode_trajectories(content[SIZE.size :], [])[0]


def decode_trajectories(content: memoryview, prompt_ids: list[int]) -> list[Trajectory]:
    rollouts: list[Trajectory] = []
    place = 0

    def numbers(kind: type, count: int) -> np.ndarray:
        nonlocal place
        found = np.frombuffer(content, dtype=kind, count=count, offset=place)
        place += found.nbytes
        return found

    def likely(count: int, width: int) -> TopLogprobs:
        found = numbers(np.int32, count * width), numbers(np.float32, count * width)
        return TopLogprobs(*(values.reshape(count, width) for values in found))

    while place < len(content):
        finish, count, width, is_scored, scored, scored_width = ROLLOUT.unpack_from(content, place)
        place += ROLLOUT.size
        tokens, log_probs = numbers(np.int32, count), numbers(np.float32, count)
        rollout = Trajectory(0, len(rollouts), prompt_ids, tokens, log_probs, FINISH_REASONS[finish])
        if width:
            rollout.alternatives = likely(count, width)
        if is_scored:
            before = likely(scored, scored_width)
            rollout.prompt_log_probs = PromptLogprobs(numbers(np.float32, scored), before)
        rollouts.append(rollout)
    return rollouts


def encode_error(number: int, error: BaseException) -> bytes:
    return encode(FAILED, number, json.dumps([type(error).__name__, str(error)]).encode())


def decode_error(content: memoryview) -> Exception:
    name, message = json.loads(content.tobytes())
    return ERRORS.get(name, RuntimeError)(message)


# ---- HTTP requests that the engine's process answers as a whole, and its responses


def encode_http(kind: int, number: int, head: dict[str, Any], body: bytes) -> bytes:
    """`head`: method, path, query and headers of a request, or status and headers of a response."""
    written = json.dumps(head).encode()
    return encode(kind, number, SIZE.pack(len(written)), written, body)


def decode_http(content: memoryview) -> tuple[dict[str, Any], bytes]:
    (size,) = SIZE.unpack_from(content)
    place = SIZE.size + size
    return json.loads(content[SIZE.size : place].tobytes()), content[place:].tobytes()
