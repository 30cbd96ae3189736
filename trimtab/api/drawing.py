"""How a Learner's answers are drawn: the engine's settings, from keywords."""

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from trimtab.api.suggesting import suggested
from trimtab.errors import UserError
from trimtab.rollout.types import Sampling

SAMPLING = [known.name for known in fields(Sampling) if known.name not in ("n", "seed", "plain_log_probs")]


def sampling_of(n: int, wanted: dict[str, Any], stops: tuple[int, ...]) -> Sampling:
    """`stops`: where answers end unless somebody says otherwise."""
    for name in wanted:
        if name not in SAMPLING:
            raise UserError(f"sampling has no setting {name!r}; {suggested(name, SAMPLING)}")
    values: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in wanted.items()
    }
    if isinstance(values.get("stop_strings"), str):
        values["stop_strings"] = (values["stop_strings"],)
    values.setdefault("stop_token_ids", stops)
    try:
        return Sampling(n=n, **values)
    except TypeError:
        raise UserError(f"sampling: a setting is of the wrong kind: n={n!r}, {wanted}") from None


def rooms(prompts: Sequence[list[int]], sampling: Sampling, context: int | None) -> list[int]:
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
