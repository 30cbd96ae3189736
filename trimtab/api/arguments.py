"""The arguments of a call as options: objects become places of files, rewards the options that name them."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from trimtab.api.given import Given, is_model
from trimtab.api.rewards import reward_options
from trimtab.config.catalogue import find, options_of
from trimtab.config.groups import PER_DEVICE, CallOptions
from trimtab.config.parse import parse_values
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
) -> Iterator[Arguments]:
    """`named`: arguments that stand for options of these names; None is as good as left out. What was written for the
    call and has not been moved to its run is gone at the end."""
    named = {name: value for name, value in named.items() if value is not None}
    options = _under_own_names(job_class, options, named)
    # A mistyped name is told before anything is written.
    parse_values(job_class, {name: value for name, value in options.items() if not _is_object(name, value)})
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
