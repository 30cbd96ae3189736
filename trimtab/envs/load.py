"""An environment by its source: `FILE.py[:NAME]`, or a library's name of one. Runs in the worker processes; whose shape
a class is of is told by its methods, as with reward functions."""

import importlib.util
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from trimtab.envs.shapes import native
from trimtab.envs.shapes.adapted import Adapted, Maker, needed
from trimtab.errors import UserError

PREFERRED = ("AgentInstance", "Environment", "Env")


@dataclass(frozen=True)
class About:
    """What the run knows of a source without loading it."""

    name: str
    shape: str  # in words
    kind: Literal["environment", "agent"] = "environment"
    tools: list[dict[str, Any]] = field(default_factory=list)  # schemas that are known before a reset
    offers_rows: bool = False


@dataclass(frozen=True)
class Loaded:
    about: About
    make: Callable[[], Adapted] | None = None  # of an environment
    rows: Callable[[int, int], list[dict[str, Any]]] | None = (
        None  # count and seed; where the source has prompts itself
    )


@dataclass(frozen=True)
class Shape:
    words: str
    fits: Callable[[type], bool]
    adapt: Callable[[Maker], Adapted]


SHAPES = (Shape(native.WORDS, native.fits, native.Native),)


def load(source: str) -> Loaded:
    """Raises UserError where there is nothing to be loaded; what the author's code raises passes through."""
    file, name = split(source)
    if not file.is_file():
        raise UserError(f"environment {file}: no such file")
    maker, shape = _found(_module(file), name, str(file))
    return Loaded(About(_name(maker), shape.words), lambda: shape.adapt(maker))


def split(source: str) -> tuple[Path, str | None]:
    file, colon, name = source.rpartition(":")
    place, wanted = (file, name) if colon and file.endswith(".py") else (source, None)
    return Path(place).expanduser().resolve(), wanted


def recognise(candidate: type) -> Shape | None:
    return next((shape for shape in SHAPES if shape.fits(candidate)), None)


def _found(module: ModuleType, name: str | None, file: str) -> tuple[Maker, Shape]:
    if name is not None:
        return _of_name(module, name, file)
    known = {
        found: shape
        for found in vars(module).values()
        if inspect.isclass(found) and found.__module__ == module.__name__ and (shape := recognise(found))
    }
    # What others are made from is not itself meant.
    ends = {found: shape for found, shape in known.items() if not any(found in other.__mro__[1:] for other in known)}
    preferred = [found for found in ends if found.__name__ in PREFERRED]
    meant = preferred if len(preferred) == 1 else list(ends)
    if not meant:
        raise UserError(f"{file}: there is no environment in it: {_expected()}")
    if len(meant) > 1:
        names = ", ".join(found.__name__ for found in meant)
        raise UserError(f"{file}: {names} could all be meant: name one after a colon, as in {file}:{_name(meant[0])}")
    return _makeable(meant[0], ends[meant[0]], file)


def _of_name(module: ModuleType, name: str, file: str) -> tuple[Maker, Shape]:
    found = getattr(module, name, None)
    if not callable(found):
        raise UserError(f"{file}: there is no class or function {name} in it")
    if inspect.isclass(found):
        shape = recognise(found)
        if shape is None:
            raise UserError(f"{file}: {name} is no environment: {_expected()}")
        return _makeable(found, shape, file)
    if needed(found):
        raise UserError(
            f"{file}: {name} needs {', '.join(needed(found))}: a function that makes environments takes nothing"
        )
    shape = recognise(type(found()))
    if shape is None:
        raise UserError(f"{file}: what {name} makes is no environment: {_expected()}")
    return found, shape


def _makeable(found: type, shape: Shape, file: str) -> tuple[Maker, Shape]:
    if needed(found):
        raise UserError(
            f"{file}: {_name(found)} needs {', '.join(needed(found))} to be made: write a function without parameters "
            f"that makes one, and name that, as in {file}:make"
        )
    return found, shape


def _name(maker: Maker) -> str:
    return getattr(maker, "__name__", type(maker).__name__)


def _expected() -> str:
    return "a class is needed with " + "; or ".join(shape.words for shape in SHAPES)


def _module(file: Path) -> ModuleType:
    sys.path.insert(0, str(file.parent))  # the file may import its neighbours
    specification = importlib.util.spec_from_file_location("environment_file", file)
    assert specification is not None and specification.loader is not None, "it is a Python file"
    module = importlib.util.module_from_spec(specification)
    sys.modules[specification.name] = module
    specification.loader.exec_module(module)
    return module
