"""The process in which a reward function runs: `python -m trimtab.rewards.worker SOCKET SECONDS BYTES FILE [FUNCTION]`.

It reads requests from the socket and answers in JSON, so that nothing the function returns is unpickled by the run: one
answer a request, or one a sample where the function takes single samples. It imports neither torch nor anything else of
weight unless the file does. It leads a process group of its own, which ends with it: whatever the function started.
"""

import asyncio
import atexit
import contextlib
import importlib.util
import json
import os
import pickle
import resource
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any

from trimtab.rewards.signatures import Signature, find_signature
from trimtab.rewards.types import RewardRequest

SECONDS_TO_END = 1.0  # for a function that is at rest, and what its file has to tidy up
GRACE = 5.0  # a run that still lives has ended a hanging worker long before


def main(socket: str, seconds: str, memory: str, file: str, function: str | None = None) -> None:
    connection = Connection(int(socket))
    atexit.register(os.killpg, 0, signal.SIGKILL)  # the first to be registered is the last to be called
    threading.Thread(target=_end_with_the_run, args=(connection.fileno(),), daemon=True).start()
    resource.setrlimit(resource.RLIMIT_DATA, (int(memory), resource.getrlimit(resource.RLIMIT_DATA)[1]))
    try:
        signature = find_signature(_load(Path(file)), function)
    except BaseException as error:
        connection.send_bytes(_encoded({"error": _told(error, file)}))
        return
    kind = {"batched": signature.batched, "is_async": signature.is_async}
    about = {"project": signature.project, "name": signature.function.__name__, **kind}
    connection.send_bytes(_encoded(about))
    with contextlib.suppress(EOFError):  # the run has closed us, or is gone
        while True:
            request = pickle.loads(connection.recv_bytes())
            parts = [request] if signature.batched else [request.take([row]) for row in range(len(request))]
            for answer in _answers(signature, parts, file, float(seconds)):
                connection.send_bytes(answer)


def _end_with_the_run(socket: int) -> None:
    """The run closes its end of the socket, or it is killed and the system does."""
    gone = select.poll()
    gone.register(socket, 0)  # which reports the other end's closing, and nothing else
    gone.poll()
    time.sleep(SECONDS_TO_END)
    os.killpg(0, signal.SIGKILL)


def _answers(signature: Signature, parts: list[RewardRequest], file: str, seconds: float) -> Iterator[bytes]:
    if signature.is_async:
        # All of them at once: such a function mostly waits for somebody else.
        yield from asyncio.run(_gathered(signature, parts, file, seconds))
        return
    for part in parts:
        signal.setitimer(signal.ITIMER_REAL, seconds + GRACE)
        try:
            answer = _encoded({"answer": _plain(signature.call(part))})
        except BaseException as error:  # sys.exit in a reward function is a fault like any other
            answer = _encoded({"error": _told(error, file)})
        signal.setitimer(signal.ITIMER_REAL, 0)
        yield answer


async def _gathered(signature: Signature, parts: list[RewardRequest], file: str, seconds: float) -> list[bytes]:
    async def one(part: RewardRequest) -> bytes:
        try:
            return _encoded({"answer": _plain(await asyncio.wait_for(signature.call(part), seconds))})
        except TimeoutError:
            return _encoded({"late": True})
        except BaseException as error:
            return _encoded({"error": _told(error, file)})

    return await asyncio.gather(*map(one, parts))


def _plain(value: Any) -> Any:
    """Tensors and arrays as lists, anything strange by its name, so that the answer can be written as JSON."""
    if hasattr(value, "tolist"):
        return _plain(value.tolist())
    if isinstance(value, dict):
        return {str(name): _plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return value if value is None or isinstance(value, int | float | str) else f"<{type(value).__name__}>"


def _told(error: BaseException, file: str) -> str:
    """The error in one line, with the line of the file where it was met."""
    text = " ".join(str(error).split())
    told = (f"{type(error).__name__}: {text}" if text else type(error).__name__)[:500]
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    return f"{told} (line {lines[-1]})" if lines else told


def _encoded(message: dict[str, Any]) -> bytes:
    return json.dumps(message).encode()


def _load(file: Path) -> ModuleType:
    sys.path.insert(0, str(file.parent))  # the file may import its neighbours
    specification = importlib.util.spec_from_file_location("reward_file", file)
    assert specification is not None and specification.loader is not None, "the parent has seen that it is Python"
    module = importlib.util.module_from_spec(specification)
    sys.modules[specification.name] = module
    specification.loader.exec_module(module)
    return module


if __name__ == "__main__":
    main(*sys.argv[1:])
