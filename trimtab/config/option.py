"""An option: a dataclass field with its default, its limits and its help text, described once for every reader.

`option`, `every`, `required` and the like declare a field. `options_of` describes all options of a job, for the parser,
the help and the resolved config. `from_text` and `from_yaml` read a value. What several options mean together is in the
`check` of their group.
"""

import ast
import difflib
import functools
import inspect
import itertools
import math
import sys
import textwrap
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any, ClassVar, Literal, cast, dataclass_transform

from trimtab.config.aliases import aliases_of, meant

Place = Literal["path", "model"]


@dataclass(frozen=True)
class Limits:
    """The values that make sense. None makes sense wherever it is a value at all."""

    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None
    choices: tuple[Any, ...] = ()
    steps: bool = False
    """A number of steps above 0, or -1."""

    def complaint(self, value: Any) -> str | None:
        """What is wrong with the value, to follow the option's name."""
        for one in value if isinstance(value, tuple) else (value,):
            if not self._allow(one):
                shown = f"{one:g}" if isinstance(one, int | float) else one
                return f"has {shown}: each must be {self}" if one is not value else f"is {shown}: it must be {self}"
        return None

    def _allow(self, value: Any) -> bool:
        return value is None or (
            (self.at_least is None or value >= self.at_least)
            and (self.above is None or value > self.above)
            and (self.at_most is None or value <= self.at_most)
            and (self.below is None or value < self.below)
            and (not self.choices or value in self.choices)
            and (not self.steps or value >= 1 or value == -1)
        )

    def __str__(self) -> str:
        if self.steps:
            return "a number of steps above 0, or -1"
        if len(self.choices) > 6:
            return f"one of {', '.join(self.choices)}"
        if self.choices:
            *others, last = map(str, self.choices)
            return f"{', '.join(others)} or {last}" if others else last
        if self.at_least is not None and self.at_most is not None:
            return f"between {self.at_least:g} and {self.at_most:g}"
        bounds = {"at least": self.at_least, "above": self.above, "at most": self.at_most, "below": self.below}
        return " and ".join(f"{words} {bound:g}" for words, bound in bounds.items() if bound is not None)


def option(
    default: Any,
    *,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
    choices: Iterable[Any] | Mapping[Any, str] = (),
    addresses: bool = False,
    **traits: Any,
) -> Any:
    """An option with its bounds or choices; of a tuple, those of each value. Options without any are plain defaults.

    `choices` as a mapping: each with its name in the field, which help shows. `addresses` and `traits`: `place`,
    `needs`, `refused` and `always`, as in `Option`.
    """
    limits = Limits(at_least, above, at_most, below, tuple(choices))
    called = choices if isinstance(choices, Mapping) else {}
    metadata = {"limits": limits, "called": called, "addresses": addresses, **traits}
    return field(default=default, repr=not addresses, metadata=metadata)


def every(default: int) -> Any:
    """An option for what happens every given number of steps, or with -1 never."""
    return field(default=default, metadata={"limits": Limits(steps=True)})


def of_this_call(default: Any, *, above: float | None = None) -> Any:
    """An option about this call, not about the run: not in the resolved config, and equal runs may differ in it."""
    return field(default=default, compare=False, metadata={"of_this_call": True, "limits": Limits(above=above)})


def secret(default: Any, bare: str | None = None) -> Any:
    """An option whose value may be a key, shown nowhere; standing alone, or true in YAML, it has the value `bare`: then
    the key comes from the environment."""
    return field(default=default, repr=False, metadata={"secret": True, "bare": bare})


def required(shown: str, what: str, place: Place | None = None) -> Any:
    """An option without which its job cannot start: `shown` stands for its value in the usage line, `what` says in
    words what to give. Whatever its type says, it is None until it is set, which check refuses."""
    return field(default=None, metadata={"required": (shown, what), "place": place})


@dataclass_transform(
    frozen_default=True, kw_only_default=True, field_specifiers=(option, every, of_this_call, secret, required, field)
)
class OptionGroup:
    """Makes every subclass a frozen dataclass. Keywords of a class statement change defaults of inherited options:
    bounds, choices and the like stay, and an option that is required elsewhere is not."""

    def __init_subclass__(cls, **defaults: Any) -> None:
        for name, default in defaults.items():
            inherited = [vars(base).get("__dataclass_fields__", {}) for base in cls.__mro__]
            known = next((known[name] for known in inherited if name in known), None)
            if known is None:
                raise KeyError(f"{cls.__name__} has no option {name}")
            kept = {key: value for key, value in known.metadata.items() if key != "required"}
            # Declaring the field again under the same type is how a dataclass takes a new default.
            cls.__annotations__[name] = known.type
            setattr(cls, name, field(default=default, repr=known.repr, compare=known.compare, metadata=kept))
        dataclass(frozen=True, kw_only=True)(cls)


class Options(OptionGroup):
    """What every group of options is."""

    given: frozenset[str] = field(default=cast(Any, None), compare=False, repr=False, metadata={"no_option": True})
    """Names of the options that the user set, some of them perhaps to their defaults. Options that are made in Python
    count as set where they differ from their defaults."""

    idle_here: ClassVar[Mapping[str, str]] = {}
    """Options that never have an effect in the job, and why: what follows `has no effect`."""

    def __post_init__(self) -> None:
        if self.given is None:
            names = frozenset(known.name for known in fields(self) if self.changed(known.name))
            object.__setattr__(self, "given", names)

    def settle(self, changes: dict[str, Any]) -> Iterable[str]:
        """Put into `changes` what the group's options leave open; a line for each value that is set aside."""
        return ()

    def check(self) -> Iterable[str]:
        """Refuse (UserError) what the group's options cannot mean together; a line for what they probably do not."""
        return ()

    def may_lack(self, name: str) -> bool:
        """Whether these options do without one that their job cannot start without else."""
        return False

    def changed(self, name: str) -> bool:
        """Whether an option is not at its default."""
        known = self.__dataclass_fields__[name]
        return "no_option" not in known.metadata and getattr(self, name) != known.default

    def asks(self, name: str) -> bool:
        """Whether the job has this option and the user set it to anything but off."""
        if name not in self.given:
            return False
        value, limits = getattr(self, name), self.__dataclass_fields__[name].metadata.get("limits")
        return value is not None and value is not False and not (limits is not None and limits.steps and value == -1)

    def idle(self, names: Iterable[str], why: str) -> list[str]:
        """A line for each of these options that the user set."""
        return [f"--{name} has no effect {why}" for name in names if self.asks(name)]


# ---- the options of a job, read from its dataclass


@dataclass(frozen=True, kw_only=True)
class Option:
    """What is known of one option of a job."""

    name: str
    kind: type
    """bool, int, float or str: the type of one value."""
    count: int | None
    """How many values: None for one, 0 for one or more, n for exactly n."""
    optional: bool
    """None is a value."""
    words: tuple[str, ...]
    """Words that are values beside those of its type."""
    default: Any
    help: str
    section: str
    aliases: tuple[str, ...]
    limits: Limits = Limits()
    place: Place | None = None
    """A hub name, or a path that must exist: of anything, or of models, separated by commas."""
    needs: str | tuple[str, Any] | None = None
    """The option without which this one has no effect, or that option and the value it must have."""
    refused: str | None = None
    """Why no value but the default is taken."""
    always: bool = False
    """A switch for what is always done here."""
    addresses: bool = False
    """Addresses of servers, separated by commas, may be among its values; their credentials are shown nowhere."""
    secret: bool = False
    bare: str | None = None
    """A text option that may stand alone, and then has this value; False then means None."""
    of_this_call: bool = False
    required: tuple[str, str] | None = None
    """What stands for its value in the usage line, and in words what to give, if the job cannot start without it."""

    @property
    def flag(self) -> str:
        return f"--{self.name}"


def options_of(job_class: type) -> dict[str, Option]:
    """The options of a job by name, in the order in which help shows them."""
    return _described(job_class)


@functools.cache
def _described(job_class: type) -> dict[str, Option]:
    declared = {known.name: known for known in fields(job_class) if "no_option" not in known.metadata}
    options: dict[str, Option] = {}
    for group in job_class.__mro__:
        for name, text in _help_texts(group).items():
            if name in declared:
                options[name] = _option(declared[name], text, inspect.getdoc(group) or "", aliases_of(name, declared))
    assert options.keys() == declared.keys(), f"without help text: {sorted(declared.keys() - options.keys())}"
    return options


def _option(declared: Field, text: str, section: str, aliases: tuple[str, ...]) -> Option:
    kind, count, optional, words = _shape(declared.type)
    assert declared.default is not MISSING, f"{declared.name} has no default"
    traits = dict(declared.metadata)
    if called := traits.pop("called", {}):  # choices with names that people know
        *others, last = (f"{choice} ({name})" for choice, name in called.items())
        text = f"{text}: {', '.join(others)} or {last}."
    return Option(
        name=declared.name,
        kind=kind,
        count=count,
        optional=optional or "required" in traits,  # None until it is set
        words=words,
        default=declared.default,
        help=text,
        section=section,
        aliases=aliases,
        **traits,
    )


def _shape(annotation: Any) -> tuple[type, int | None, bool, tuple[str, ...]]:
    """The type of one value, how many there are, whether None is one, and which words are: `int | Literal["auto"]`."""
    union = typing.get_origin(annotation) in (types.UnionType, typing.Union)
    members = typing.get_args(annotation) if union else (annotation,)
    words = [word for member in members if typing.get_origin(member) is Literal for word in typing.get_args(member)]
    (kind,) = (m for m in members if m is not types.NoneType and typing.get_origin(m) is not Literal)
    optional = types.NoneType in members
    if typing.get_origin(kind) is tuple:
        inner = typing.get_args(kind)
        return inner[0], (0 if inner[-1] is Ellipsis else len(inner)), optional, tuple(words)
    assert kind in (bool, int, float, str), f"no command line form for {annotation}"
    return kind, None, optional, tuple(words)


@functools.cache
def _help_texts(group: type) -> dict[str, str]:
    """The string under each field of a class."""
    if group is object:
        return {}
    defined: ast.stmt | None = _classes_of(group.__module__).get(group.__qualname__)
    if defined is None:  # inside a function
        (defined,) = ast.parse(textwrap.dedent(inspect.getsource(group))).body
    assert isinstance(defined, ast.ClassDef), group
    texts = {}
    for statement, following in itertools.pairwise(defined.body):
        if (
            isinstance(statement, ast.AnnAssign)
            and isinstance(statement.target, ast.Name)
            and isinstance(following, ast.Expr)
            and isinstance(following.value, ast.Constant)
        ):
            texts[statement.target.id] = " ".join(str(following.value.value).split())
    return texts


@functools.cache
def _classes_of(module: str) -> dict[str, ast.ClassDef]:
    """Read once: `inspect.getsource` reads the whole file again for every class in it, and every command waits."""
    body = ast.parse(inspect.getsource(sys.modules[module])).body
    return {statement.name: statement for statement in body if isinstance(statement, ast.ClassDef)}


def find(job_class: type, name: str) -> Option | None:
    """The option of this name or alias."""
    options = options_of(job_class)
    return options.get(meant(name, options))


def suggestion(job_class: type, name: str) -> str | None:
    """The name of the option that someone who wrote `name` most likely meant."""
    options = options_of(job_class)
    names = [*options, *(alias for option in options.values() for alias in option.aliases)]
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.7)
    containing = sorted((known for known in options if name in known), key=len) if len(name) > 3 else []
    close = close or containing or difflib.get_close_matches(name, names, n=1, cutoff=0.55)
    return meant(close[0], options) if close else None


# ---- values, from a word of the command line or from YAML; a ValueError's text follows the option's name


REDACTED = "<redacted>"
"""Stands in written configs for a value that is a key."""

_TRUE = {"true", "yes", "on", "1"}
_FALSE = {"false", "no", "off", "0"}


def from_text(option: Option, text: str) -> Any:
    """One value of the option, from one word. In a list None is a word like any other."""
    if option.optional and option.count is None and text == "None":
        return None
    if option.bare and text.lower() in ("true", "false"):
        return option.bare if text.lower() == "true" else None
    if text in option.words:
        return text
    try:
        return plain(option.kind, text)
    except ValueError as error:
        raise ValueError(f"{error}; or {' or '.join(option.words)}" if option.words else str(error)) from None


def from_yaml(option: Option, value: Any) -> Any:
    """The option's whole value, from what a YAML file holds. Numbers such as 5e-6 are text to YAML, so text is read as
    on the command line."""
    if option.count is not None:
        if option.optional and value in (None, "None"):
            return None
        items = value if isinstance(value, list) else [value]
        if not items or len(items) != (option.count or len(items)):
            raise ValueError(f"takes a list of {option.count or 'one or more'} values, not {value!r}")
        return tuple(_one_from_yaml(option, item) for item in items)
    return _one_from_yaml(option, value)


def _one_from_yaml(option: Option, value: Any) -> Any:
    if isinstance(value, str):
        return from_text(option, value)
    if value is None and option.optional:
        return None
    if isinstance(value, bool) and option.bare:
        return from_text(option, str(value))
    return plain(option.kind, value, shown="what is there" if option.secret else None)


def plain(kind: type, value: Any, shown: str | None = None) -> Any:
    """A value of this type, from what a YAML file or a word holds. `shown`: what an error says of the value."""
    if isinstance(value, str):
        return _truth(value) if kind is bool else value if kind is str else _number(kind, value)
    if isinstance(value, bool) and kind is bool:
        return value
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if number and kind in (int, float):
        return _number(kind, repr(value))
    if number and kind is str:
        return str(value)
    raise ValueError(f"takes {_NAMES[kind]}, not {shown or repr(value)}")


def _truth(text: str) -> bool:
    if text.lower() in _TRUE | _FALSE:
        return text.lower() in _TRUE
    raise ValueError(f"takes {_NAMES[bool]}, not {text!r}")


def _number(kind: type, text: str) -> int | float:
    try:
        if kind is int:
            try:
                return int(text)
            except ValueError:
                number = float(text)  # 1e8 is a whole number too
                if number != int(number):
                    raise
                return int(number)
        number = float(text)
        if not math.isfinite(number):
            raise ValueError
        return number
    except (ValueError, OverflowError):
        raise ValueError(f"takes {_NAMES[kind]}, not {text!r}") from None


_NAMES = {bool: "True or False", int: "a whole number", float: "a number", str: "text"}
