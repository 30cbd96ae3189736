"""The process in which a reward function runs: `python -m trimtab.rewards.worker HANDLE SECONDS BYTES FILE [FUNCTION]`.

It reads requests from the socket and answers in JSON, so that nothing the function returns is unpickled by the run: one
answer a request, or one a sample where the function takes single samples. It imports neither torch nor anything else of
weight unless the file does. It leads a process group of its own, which ends with it: whatever the function started.
"""

import asyncio
import contextlib
import json
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trimtab.rewards.signatures import Signature, find_signature
from trimtab.rewards.types import RewardRequest
from trimtab.sandbox.worker import begin_worker, module_of, plain, told


def main(handle: str, seconds: str, memory: str, file: str, function: str | None = None) -> None:
    connection = begin_worker(handle, int(memory), limited=True)
    try:
        signature = find_signature(module_of(Path(file), "reward_file"), function)
    except BaseException as error:
        connection.send_bytes(_encoded({"error": told(error, file)}))
        return
    kind = {"batched": signature.batched, "is_async": signature.is_async, "reads_ids": signature.reads_ids}
    about = {"project": signature.project, "name": signature.function.__name__, **kind}
    connection.send_bytes(_encoded(about))
    with contextlib.suppress(EOFError):  # the run has closed us, or is gone
        while True:
            request = pickle.loads(connection.recv_bytes())
            parts = [request] if signature.batched else [request.take([row]) for row in range(len(request))]
            for answer in _answers(signature, parts, file, float(seconds)):
                connection.send_bytes(answer)


def _answers(signature: Signature, parts: list[RewardRequest], file: str, seconds: float) -> Iterator[bytes]:
    if signature.is_async:
        # All of them at once: such a function mostly waits for somebody else.
        yield from asyncio.run(_gathered(signature, parts, file, seconds))
        return
    for part in parts:
        try:
            answer = _encoded({"answer": plain(signature.call(part))})
        except BaseException as error:  # sys.exit in a reward function is a fault like any other
            answer = _encoded({"error": told(error, file)})
        yield answer


async def _gathered(signature: Signature, parts: list[RewardRequest], file: str, seconds: float) -> list[bytes]:
    async def one(part: RewardRequest) -> bytes:
        try:
            return _encoded({"answer": plain(await asyncio.wait_for(signature.call(part), seconds))})
        except TimeoutError:
            return _encoded({"late": True})
        except BaseException as error:
            return _encoded({"error": told(error, file)})

    return await asyncio.gather(*map(one, parts))


def _encoded(message: dict[str, Any]) -> bytes:
    return json.dumps(message).encode()


if __name__ == "__main__":
    main(*sys.argv[1:])
