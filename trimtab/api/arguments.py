"""The arguments of a call as options: objects become places of files, rewards the options that name them. And back:
errors that speak of options speak of arguments to a caller in Python."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from trimtab.api.given import Given, is_model
from trimtab.api.rewards import reward_options
from trimtab.config.option import Option, find, options_of
from trimtab.config.parser import parse_values
from trimtab.config.training_options import PER_DEVICE, CallOptions
from trimtab.errors import UserError

DATA = ("prompt_data", "dataset", "eval_dataset", "pretrain_data", "heldout_prompt_data")


@dataclass(frozen=True)
class Arguments:
    values: dict[str, Any]
    """Options by their names, as `parse_values` takes them."""
    given: Given
    functions: dict[str, Callable[..., Any]]
    """What the options name as rewards."""


@contextmanager
def resolved(
    job_class: type[CallOptions],
    options: dict[str, Any],
    named: dict[str, Any],
    *,
    tokenizer: Any = None,
    reward: Any = None,
    environment: Any = None,
    tools: Sequence[Callable[..., Any]] = (),
    names: Mapping[str, str] | None = None,
) -> Iterator[Arguments]:
    """`named`: arguments that stand for options of these names; None is as good as left out. `names`: what the caller
    calls them. What was written for the call and has not been moved to its run is gone at the end."""
    named = {name: value for name, value in named.items() if value is not None}
    options = _under_own_names(job_class, options, named)
    # A mistyped name is told before anything is written.
    checked = {name: v for name, v in options.items() if find(job_class, name) is None or not _is_object(name, v)}
    parse_values(job_class, checked, names)
    given = Given()
    try:
        rewards, functions = reward_options(reward, options, given)
        values = {**named, **options, **rewards}
        if environment is not None or tools:
            values |= given.environment(environment, tools)
        known = options_of(job_class).get("input_key")
        column = str(values.get("input_key") or (known.default if known else "input"))
        for name, value in values.items():
            if name in DATA and value is not None:
                values[name] = given.rows(name, value, column, values.get("max_samples"))
            elif name == "pretrain":
                values[name] = given.model(name, value, tokenizer)
            elif is_model(value):
                # Its own tokenizer, where it says where that is.
                values[name] = given.model(name, value, None if getattr(value, "name_or_path", "") else tokenizer)
        yield Arguments(values, given, functions)
    finally:
        given.close()


def _under_own_names(job_class: type[CallOptions], options: dict[str, Any], named: dict[str, Any]) -> dict[str, Any]:
    """Options under their own names; none of them may be an argument too."""
    found: dict[str, Any] = {}
    for name, value in options.items():
        option = find(job_class, name)
        own = option.name if option is not None else name
        if own in named:
            raise UserError(f"{name} is given twice: as an argument and as an option")
        # Of words that mean one option but not one step, the one that was used matters.
        found[name if option is None or name in PER_DEVICE or own in found else own] = value
    return found


def _is_object(name: str, value: Any) -> bool:
    return is_model(value) or (name in DATA and not isinstance(value, str))


# A command for the shell stays one. Behind a flag may be its value: numbers, True, False, None, a placeholder, a quote.
_FLAG = re.compile(r"\b(?:trimtab [a-z-]+ --|python -m )[^;,()]*|--([a-z]\w*)")
_VALUE = re.compile(r" ((?:-?\d[\w.+-]* ?\b)+|True|False|None|[A-Z]{2}[\w.:]*|'[^']*')(?![\w/])")
_WORD = re.compile(r" ([\w.-]+)")
_PLACE = re.compile(r" (\S+)(?=: )")


def as_arguments(text: str, job_class: type, names: Mapping[str, str]) -> str:
    """A text about options of a command in the words of a call: `--max_len 8` is `max_len=8`, a switch `bf16=True`.
    `names`: arguments of the call by the options that they stand for."""
    told, end = "", 0
    for found in _FLAG.finditer(text):
        option = find(job_class, found[1]) if found[1] else None
        if option is None and found[1] not in names:
            continue
        told += text[end : found.start()] + names.get(option.name if option else found[1], found[1])
        # What a sentence is about is named as it is; what is to be given has its sign.
        is_subject = not found.start() or text[: found.start()].endswith((": ", "; "))
        value = _value_behind(text, found.end(), option, is_subject)
        end = found.end() if value is None else value.end()
        if value is not None:
            told += f"={_in_brackets(value[1])}"
        elif not is_subject:
            told += "=True" if option is not None and option.kind is bool else "="
    return told + text[end:]


def _value_behind(text: str, start: int, option: Option | None, is_subject: bool) -> re.Match[str] | None:
    word = _WORD.match(text, start)
    if word and option is not None and word[1] in option.limits.choices:
        return word
    return _VALUE.match(text, start) or (_PLACE.match(text, start) if is_subject else None)


def _in_brackets(value: str) -> str:
    numbers = value.split() if value[0] in "-0123456789" else []
    return f"({', '.join(numbers)})" if len(numbers) > 1 else value
