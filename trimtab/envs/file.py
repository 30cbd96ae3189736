"""The environment of a Python file. Whose shape it is of is told by its methods, as with reward functions."""

import functools
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from trimtab.envs.loaded import About, Loaded
from trimtab.envs.shapes import agent, gymnasium, native, openrlhf, skyrl, textarena, trl
from trimtab.envs.shapes.adapted import Adapted, Maker, needed, parameters
from trimtab.errors import UserError
from trimtab.processes.source import module_of

PREFERRED = ("AgentInstance", "Environment", "Env", "run", "step")


@dataclass(frozen=True)
class Shape:
    words: str
    fits: Callable[[Any], bool]
    adapt: Callable[[Maker], Adapted] | None  # None: of an agent
    needs: tuple[str, ...] = ()  # what its maker may ask for


CLASSES = (  # one that fits several is of the first
    Shape(openrlhf.WORDS, openrlhf.fits, openrlhf.Instance),
    Shape(skyrl.WORDS, skyrl.fits, skyrl.SkyRL, ("env_config", "extras")),
    Shape(textarena.WORDS, textarena.fits, textarena.TextArena),
    Shape(gymnasium.WORDS, gymnasium.fits, gymnasium.Gymnasium),
    Shape(native.WORDS, native.fits, native.Native),
    Shape(trl.WORDS, trl.fits, trl.Tooled),
)
FUNCTIONS = (
    Shape(agent.WORDS, agent.fits, None),
    Shape(openrlhf.OLDER_WORDS, openrlhf.fits_older, openrlhf.Older),
)


def load_file(file: Path, name: str | None) -> Loaded:
    """The class or function called `name`, or the only one that can be meant. A function `rows(count, seed)` beside it
    offers prompts."""
    openrlhf.offer_stand_in()
    module = module_of(file, "environment_file")
    openrlhf.refuse_executors(module, str(file))
    found, shape = _only(module, str(file)) if name is None else _called(module, name, str(file))
    rows = getattr(module, "rows", None)
    return _loaded(found, shape, rows)


def load_object(found: Any) -> Loaded:
    """The same of a class or function that is here already: an environment, what makes one, or an agent."""
    module, name = sys.modules.get(getattr(found, "__module__", "")), _name(found)
    if not callable(found):
        raise UserError(f"environment: give a class or a function, not an object of type {type(found).__name__}")
    return _loaded(*_meant(found, name, "environment"), getattr(module, "rows", None))


def _loaded(found: Maker, shape: Shape, rows: Any) -> Loaded:
    offered = rows if inspect.isfunction(rows) and list(parameters(rows)) == ["count", "seed"] else None
    kind: Literal["environment", "agent"] = "agent" if shape.adapt is None else "environment"
    about = About(_name(found), shape.words, kind, offers_rows=offered is not None)
    if shape.adapt is None:
        return Loaded(about, run=functools.partial(agent.run, found), rows=offered)
    return Loaded(about, functools.partial(shape.adapt, found), rows=offered)


def _only(module: ModuleType, file: str) -> tuple[Maker, Shape]:
    own = [value for value in vars(module).values() if getattr(value, "__module__", None) == module.__name__]
    known = {value: shape for value in own if (shape := _recognised(value)) is not None}
    bases = {base for value in known if inspect.isclass(value) for base in value.__mro__[1:]}
    ends = [value for value in known if value not in bases]  # what others are made from is not itself meant
    preferred = [value for name in PREFERRED for value in ends if _name(value) == name]
    if not ends:
        raise UserError(f"{file}: there is no environment in it, which is {_expected()}")
    if len(ends) > 1 and not preferred:
        names = ", ".join(map(_name, ends))
        raise UserError(f"{file}: {names} could all be meant: name one after a colon, as in {file}:{_name(ends[0])}")
    meant = (preferred or ends)[0]
    return _makeable(meant, known[meant], file)


def _called(module: ModuleType, name: str, file: str) -> tuple[Maker, Shape]:
    found = getattr(module, name, None)
    if not callable(found):
        raise UserError(f"{file}: there is no class or function {name} in it")
    return _meant(found, name, file)


def _meant(found: Maker, name: str, file: str) -> tuple[Maker, Shape]:
    shape = _recognised(found)
    if shape is not None:
        return _makeable(found, shape, file)
    if inspect.isclass(found):
        raise UserError(f"{file}: {name} is no environment, which is {_expected()}")
    if needed(found):
        raise UserError(
            f"{file}: {name} needs {', '.join(needed(found))}: a function that makes environments takes nothing"
        )
    made = found()
    shape = _recognised(type(made))
    if shape is None:
        raise UserError(f"{file}: what {name} makes is no environment, which is {_expected()}")
    return found, shape


def _recognised(found: Any) -> Shape | None:
    shapes = CLASSES if inspect.isclass(found) else FUNCTIONS if inspect.isfunction(found) else ()
    return next((shape for shape in shapes if shape.fits(found)), None)


def _makeable(found: Maker, shape: Shape, file: str) -> tuple[Maker, Shape]:
    missing = [name for name in needed(found) if name not in shape.needs] if inspect.isclass(found) else []
    if missing:
        raise UserError(
            f"{file}: {_name(found)} needs {', '.join(missing)} to be made: write a function without parameters that "
            f"makes one, and name that, as in {file}:make"
        )
    return found, shape


def _name(found: Maker) -> str:
    return getattr(found, "__name__", type(found).__name__)


def _expected() -> str:
    classes = "; ".join(shape.words for shape in CLASSES)
    return f"a class with {classes}; or a function: {'; '.join(shape.words for shape in FUNCTIONS)}"
