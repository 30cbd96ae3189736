"""An environment by its source: `FILE.py[:NAME]`, `gem:NAME`, `rg:NAME`, `verifiers:MODULE`, or `trimtab:NAME`, a file
that comes along. Runs in the worker processes."""

import asyncio
import contextlib
import inspect
from dataclasses import replace
from pathlib import Path

from trimtab.envs.file import load_file
from trimtab.envs.loaded import Loaded
from trimtab.envs.sources import gem, reasoning_gym
from trimtab.envs.sources.named import unknown
from trimtab.envs.sources.verifiers import load as verifiers
from trimtab.envs.tools import schemas
from trimtab.errors import UserError

LIBRARIES = {"gem": gem.load, "rg": reasoning_gym.load, "verifiers": verifiers.load}
EMBEDDED = Path(__file__).parents[1] / "embedded" / "environments"


def load(source: str) -> Loaded:
    """Raises UserError where there is nothing to be loaded; what the author's code raises passes through."""
    library, colon, name = source.partition(":")
    if colon and library in LIBRARIES:
        return with_tools(LIBRARIES[library](name))
    if colon and library == "trimtab":
        return with_tools(load_file(_embedded(source, name), None))
    file, wanted = split(source)
    if not file.is_file():
        raise UserError(f"environment {file}: no such file")
    return with_tools(load_file(file, wanted))


def split(source: str) -> tuple[Path, str | None]:
    file, colon, name = source.rpartition(":")
    place, wanted = (file, name) if colon and file.endswith(".py") else (source, None)
    return Path(place).expanduser().resolve(), wanted


def with_tools(loaded: Loaded) -> Loaded:
    """One is made, so that what cannot be made is known before the first episode."""
    if loaded.make is None:
        return loaded
    first = loaded.make()
    tools = schemas(first.tools)
    with contextlib.suppress(Exception):  # as at the end of an episode: it has been of use
        closed = first.close()
        if inspect.iscoroutine(closed):
            asyncio.run(closed)
    return replace(loaded, about=replace(loaded.about, tools=tools))


def _embedded(source: str, name: str) -> Path:
    known = sorted(file.stem for file in EMBEDDED.glob("*.py") if file.stem != "__init__")
    if name not in known:
        raise unknown(source, name, known)
    return EMBEDDED / f"{name}.py"
