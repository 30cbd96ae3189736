"""A hand to play environments with in tests, without processes."""

import asyncio
import inspect
from pathlib import Path
from typing import Any

from trimtab.envs.adapter import EnvironmentAdapter
from trimtab.envs.loader import load
from trimtab.envs.types import Task, Turn


def task(**given: Any) -> Task:
    return Task(**{"row": 0, "sample": 0, "seed": 1, "prompt": "Begin.", **given})


def turn(text: str, number: int = 0, **given: Any) -> Turn:
    message = {"role": "assistant", "content": text}
    return Turn(
        **{"text": text, "message": message, "ids": [1, 2], "finish": "stop", "number": number, "room": 99, **given}
    )


def now(found: Any) -> Any:
    """What a method gave, which may be a coroutine."""

    async def awaited() -> Any:
        return await found

    return asyncio.run(awaited()) if inspect.isawaitable(found) else found


def made(source: str, shape: str = "") -> EnvironmentAdapter:
    loaded = load(source)
    assert loaded.make is not None and shape in loaded.info.shape
    return loaded.make()


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def written(folder: Path, text: str, name: str = "environment.py") -> str:
    (folder / name).write_text(text)
    return str(folder / name)
