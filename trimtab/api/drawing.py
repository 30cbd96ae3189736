"""How a Learner's answers are drawn: the engine's settings, from keywords."""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from trimtab.api.suggesting import suggested
from trimtab.config.option import plain
from trimtab.config.parser import as_in_yaml
from trimtab.errors import UserError
from trimtab.rollout.sampling import SamplingParams

_NOT_TAKEN = ("n", "seed", "plain_log_probs", "top_log_probs")  # of which nothing would come back
SAMPLING = [known.name for known in fields(SamplingParams) if known.name not in _NOT_TAKEN]


NUMBERS: dict[str, Any] = {known.name: known.type for known in fields(SamplingParams) if known.type in (int, float)}


def sampling_of(n: int, wanted: dict[str, Any], stops: tuple[int, ...], vocabulary: int) -> SamplingParams:
    """`stops`: where answers end unless somebody says otherwise."""
    for name in wanted:
        if name not in SAMPLING:
            raise UserError(f"sampling has no setting {name!r}; {suggested(name, SAMPLING)}")
    values = {name: _value(name, value, vocabulary) for name, value in {"n": n, **wanted}.items()}
    return SamplingParams(**{"stop_token_ids": stops, **values})


def _value(name: str, value: Any, vocabulary: int) -> Any:
    if name in NUMBERS:
        try:
            return plain(NUMBERS[name], as_in_yaml(value))
        except ValueError as error:
            raise UserError(f"sampling: {name} {error}") from None
    if name == "stop_strings":
        texts = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list | tuple) else (value,)
        if not all(isinstance(text, str) for text in texts):
            raise UserError(f"sampling: stop_strings takes texts, not {value!r}")
        return texts
    if name == "logit_bias":
        if not isinstance(value, Mapping) or not all(isinstance(bias, int | float) for bias in value.values()):
            raise UserError(f"sampling: logit_bias takes a dict of numbers by token ids, not {value!r:.60}")
        return dict(zip(_tokens(name, list(value), vocabulary), value.values()))
    return _tokens(name, value, vocabulary)


def _tokens(name: str, value: Any, vocabulary: int) -> tuple[int, ...]:
    found = as_in_yaml(value)
    found = found if isinstance(found, list) else [found]
    for token in found:
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < vocabulary:
            raise UserError(f"sampling: {name} takes token ids below {vocabulary}, not {token!r}")
    return tuple(found)


def rooms(prompts: Sequence[list[int]], sampling: SamplingParams, context: int | None) -> list[int]:
    """New tokens that each prompt may get: what is asked for, or as many as the model has places for."""
    found = []
    for place, ids in enumerate(prompts):
        room = sampling.max_new_tokens if context is None else min(sampling.max_new_tokens, context - len(ids))
        if room < 1:
            raise UserError(
                f"prompts[{place}] has {len(ids)} tokens, and the model's context is {context}; shorten it to leave "
                "room for an answer"
            )
        found.append(room)
    return found


def seeds_of(seeds: Any, prompts: int) -> list[int]:
    """One for each of so many prompts."""
    found = as_in_yaml(seeds)
    if not isinstance(found, list) or not all(isinstance(seed, int) for seed in found):
        raise UserError(f"seeds must be a list of whole numbers, not {seeds!r:.60}")
    if len(found) != prompts:
        raise UserError(f"{len(found)} seeds for {prompts} prompts; one for each is needed")
    return found
