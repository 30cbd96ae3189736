"""How a job is put together from groups of options."""

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar, dataclass_transform

from trimtab.config.groups import CallOptions
from trimtab.config.option import Options

Group = TypeVar("Group", bound=Options)
Job = TypeVar("Job", bound=CallOptions)


@dataclass_transform(frozen_default=True, kw_only_default=True)
def with_defaults(**defaults: Any) -> Callable[[type[Group]], type[Group]]:
    """Make a class of groups a group itself, with these defaults in place of the groups' own.

    Bounds, choices and the like stay; an option that is required elsewhere is not, where it has a default.
    """

    def decorate(cls: type[Group]) -> type[Group]:
        inherited = {name: known for base in cls.__mro__[1:] for name, known in _fields_of(base).items()}
        for name, default in defaults.items():
            known = inherited[name]
            kept = {key: value for key, value in known.metadata.items() if key != "required"}
            # Declaring the field again under the same type is how a dataclass takes a new default.
            cls.__annotations__[name] = known.type
            setattr(
                cls, name, dataclasses.field(default=default, repr=known.repr, compare=known.compare, metadata=kept)
            )
        return dataclasses.dataclass(frozen=True, kw_only=True)(cls)

    return decorate


@dataclass_transform(frozen_default=True, kw_only_default=True)
def job(verb: str, **defaults: Any) -> Callable[[type[Job]], type[Job]]:
    """Make a class of groups a job called `verb`, with these defaults in place of the groups' own."""

    def decorate(cls: type[Job]) -> type[Job]:
        cls.verb = verb
        cls.trainer = getattr(cls, "trainer", "supervised")
        return with_defaults(**defaults)(cls)

    return decorate


def _fields_of(cls: type) -> dict[str, Any]:
    return cls.__dict__.get("__dataclass_fields__", {})
