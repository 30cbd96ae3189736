"""What can be said about options before torch is imported: mistakes are a UserError, oddities a line of warning.

Here is only the order in which everything is asked; what is asked stands beside the options: bounds, choices and needs
in their fields (option.py), the rest in the `settle` and `check` of their groups. What depends on this machine is in
support.py.
"""

import dataclasses
import os
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from trimtab.config.catalogue import options_of
from trimtab.config.groups import CallOptions
from trimtab.config.option import Options
from trimtab.config.sources import check_place, listed
from trimtab.config.support import refuse_unimplemented
from trimtab.errors import UserError

Job = TypeVar("Job", bound=Options)


def settled_and_checked(options: Job) -> tuple[Job, list[str]]:
    """The options as a run takes them and a line for each oddity; a UserError if they cannot be meant. Both name the
    words of the file that the options come from, if it has its own."""
    try:
        settled, warnings = settle(options)
        warnings += check(settled)
        refuse_unimplemented(settled)
    except UserError as error:
        raise UserError(_placed(str(error), options)) from None
    return settled, [_placed(warning, options) for warning in warnings]


def settle(options: Job) -> tuple[Job, list[str]]:
    """The options with what they leave open filled in, and a line for each value that was set aside."""
    changes: dict[str, Any] = {}
    warnings = [line for settle_group in _of_each_group(options, "settle") for line in settle_group(options, changes)]
    return dataclasses.replace(options, **changes), warnings


def check(options: Options) -> list[str]:
    """Refuse what cannot be meant; return warnings about what probably is not."""
    warnings: list[str] = []
    described = options_of(type(options))
    for name, option in described.items():
        if option.required and not getattr(options, name) and not options.may_lack(name):
            raise UserError(f"--{name} is missing: give {option.required[1]}")
    for name, option in described.items():
        value = getattr(options, name)
        if value not in option.words and (complaint := option.limits.complaint(value)):
            raise UserError(f"--{name} {complaint}")
        warnings += [line for place in places(options, name) for line in check_place(place, f"--{name}")]
    warnings += [line for check_group in _of_each_group(options, "check") for line in check_group(options)]
    return warnings + list(_without_effect(options))


def places(options: Options, name: str) -> list[str]:
    """What an option names that must exist, or be on the hub."""
    option, value = options_of(type(options))[name], getattr(options, name)
    if option.place is None or not value:
        return []
    return listed(value) if option.place == "model" and not os.path.exists(os.path.expanduser(value)) else [value]


def _placed(text: str, options: Options) -> str:
    """What is said of options, with the words of the file that it is about: their lines, or that they are not there."""
    if not isinstance(options, CallOptions) or not options.origins:
        return text
    words: dict[str, int | None] = {}
    for named in re.findall(r"--(\w+)", text):
        about = [(word, line) for option, word, line in options.origins if option == named]
        words.update([(word, line) for word, line in about if line is not None] or about[:1])
    if not words:
        return text
    lines = [str(line) for line in sorted({line for line in words.values() if line is not None})]
    where = f" line{'s' * (len(lines) > 1)} {', '.join(lines)}" if lines else ""
    told = ", ".join(word if line is not None else f"{word} (absent)" for word, line in words.items())
    return f"{options.config}{where}: {told}: {text}"


def _of_each_group(options: Options, name: str) -> Iterator[Callable[..., Iterable[str]]]:
    """The method of this name of the job itself and then of its groups, in the order of `--help`."""
    return (vars(group)[name] for group in type(options).__mro__ if name in vars(group))


def _without_effect(options: Options) -> Iterator[str]:
    for group in type(options).__mro__:
        for name, reason in vars(group).get("idle_here", {}).items():
            yield from options.idle([name], reason)
    for name, option in options_of(type(options)).items():
        if option.always and name in options.given and not getattr(options, name):
            yield f"--{name} False has no effect: it is always done here"
        if option.needs is not None:
            needed, wanted = option.needs
            found = getattr(options, needed)
            if not found or (wanted is not None and found != wanted):
                yield from options.idle([name], f"without --{needed}{'' if wanted is None else f' {wanted}'}")
