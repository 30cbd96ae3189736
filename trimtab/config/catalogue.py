"""What options a job has, read from its dataclass: the one description that parsing, help and YAML share."""

import ast
import difflib
import functools
import inspect
import itertools
import sys
import textwrap
import types
import typing
from dataclasses import MISSING, Field, dataclass, fields
from typing import Any, Literal

from trimtab.config.option import Limits, Place
from trimtab.config.spellings import aliases_of, meant


@dataclass(frozen=True)
class Option:
    name: str
    kind: type
    """bool, int, float or str: the type of one value."""
    count: int | None
    """How many values: None for one, 0 for one or more, n for exactly n."""
    optional: bool
    """None is a value."""
    words: tuple[str, ...]
    """Words that are values beside those of its type."""
    bare: str | None
    """A text option that may stand alone, and then has this value; False then means None."""
    default: Any
    help: str
    section: str
    aliases: tuple[str, ...]
    secret: bool
    of_this_call: bool
    required: tuple[str, str] | None
    """What stands for its value in the usage line, and in words what to give, if the job cannot start without it."""
    limits: Limits
    place: Place | None
    """A hub name, or a path that must exist: of anything, or of models, separated by commas."""
    needs: tuple[str, Any] | None
    """The option without which this one has no effect, and the value it must have, or None for any."""
    refused: str | None
    """Why no value but the default is taken."""
    always: bool
    """A switch for what is always done here."""
    addresses: bool
    """Addresses of servers may be in it, with credentials."""

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
                aliases = aliases_of(name, declared)
                options[name] = _option(declared[name], text, inspect.getdoc(group) or "", aliases)
    assert options.keys() == declared.keys(), f"without help text: {sorted(declared.keys() - options.keys())}"
    return options


def _option(declared: Field, text: str, section: str, aliases: tuple[str, ...]) -> Option:
    kind, count, optional, words = _shape(declared.type)
    assert declared.default is not MISSING, f"{declared.name} has no default"
    needs = declared.metadata.get("needs")
    return Option(
        name=declared.name,
        kind=kind,
        count=count,
        optional=optional or "required" in declared.metadata,  # None until it is set
        words=words,
        bare=declared.metadata.get("bare"),
        default=declared.default,
        help=_with_names(text, declared.metadata.get("called", {})),
        section=section,
        aliases=aliases,
        secret="secret" in declared.metadata,
        of_this_call="of_this_call" in declared.metadata,
        required=declared.metadata.get("required"),
        limits=declared.metadata.get("limits", Limits()),
        place=declared.metadata.get("place"),
        needs=(needs, None) if isinstance(needs, str) else needs,
        refused=declared.metadata.get("refused"),
        always=declared.metadata.get("always", False),
        addresses=declared.metadata.get("addresses", False),
    )


def _with_names(text: str, called: dict[Any, str]) -> str:
    """The help of an option whose choices have names that people know."""
    if not called:
        return text
    *others, last = (f"{choice} ({name})" for choice, name in called.items())
    return f"{text}: {', '.join(others)} or {last}."


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
