"""Rewards as a caller in Python has them, as the options that say the same."""

import difflib
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trimtab.api.given import Given, is_model
from trimtab.config.objective_options import GIVEN
from trimtab.errors import UserError

# In the order in which --reward_weights counts them; a verifier's weight stands in its name.
OPTIONS = ("reward_pretrain", "reward_func", "remote_rm_url", "reward_verifier")


def reward_options(
    reward: Any, options: Mapping[str, Any], given: Given
) -> tuple[dict[str, Any], dict[str, Callable[..., Any]]]:
    """The options for a reward or a list of them, and the functions that they name. Weights among the options are in
    the order of the list."""
    if reward is None:
        return {}, {}
    if both := [name for name in OPTIONS if options.get(name) is not None]:
        raise UserError(f"rewards are given twice, as reward and as {', '.join(both)}: give one of them")
    rewards = list(reward) if isinstance(reward, Sequence) and not isinstance(reward, str) else [reward]
    if not rewards:
        raise UserError("reward: the list is empty")
    weights = _weights(options.get("reward_weights"), len(rewards))
    functions: dict[str, Callable[..., Any]] = {}
    places: dict[str, list[tuple[str, float | None]]] = {name: [] for name in OPTIONS}
    for one, weight in zip(rewards, weights):
        option, text = _option(one, functions, given, f"reward_pretrain{len(places['reward_pretrain']) or ''}")
        if option == "reward_verifier" and weight is not None:
            text, weight = f"{text.rpartition(':')[0] or text}:{weight:g}", None
        places[option].append((text, weight))
    chosen: dict[str, Any] = {name: ",".join(text for text, _ in found) for name, found in places.items() if found}
    if weights[0] is not None:
        chosen["reward_weights"] = _in_order(places) or None
    return chosen, functions


def argument_names(names: Mapping[str, str], reward: Any) -> dict[str, str]:
    """What a call names its arguments, by option: with what it has for objects that are no option's value."""
    own = {name: name for name in ("reward", "tokenizer", "on_iteration")}
    return {**own, **names, **(dict.fromkeys(OPTIONS, "reward") if reward is not None else {})}


def _option(reward: Any, functions: dict[str, Callable[..., Any]], given: Given, name: str) -> tuple[str, str]:
    """`name`: of the folder, if it is a model."""
    if is_model(reward):
        return "reward_pretrain", given.model(name, reward, None)
    if callable(reward):
        name = base = getattr(reward, "__name__", type(reward).__name__).strip("<>")
        while name in functions:
            name = f"{base}_{len(functions) + 1}"
        functions[name] = reward
        return "reward_func", f"{GIVEN}{name}"
    if not isinstance(reward, str | os.PathLike):
        raise UserError(
            "reward takes a function, FILE.py:FUNCTION, a verifier's name, a model or its folder, or an address, not "
            f"{type(reward).__name__}"
        )
    text = os.fspath(reward)
    if text.startswith(("http://", "https://")):
        return "remote_rm_url", text
    if text.endswith(".py") or ".py:" in text:
        return "reward_func", text
    from trimtab.rewards.verifiers import VERIFIERS

    name = text.partition("(")[0].partition(":")[0].partition(",")[0].strip()
    if os.path.exists(os.path.expanduser(text)) or "/" in name:
        return "reward_pretrain", text
    if name not in VERIFIERS:
        close = difflib.get_close_matches(name, VERIFIERS, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise UserError(
            f"reward {text!r} is neither a verifier nor a folder: {hint}A reward is a function, FILE.py:FUNCTION, a "
            f"verifier ({', '.join(VERIFIERS)}), a reward model (loaded, a folder or owner/name; a hub name without an "
            "owner is given as reward_pretrain=), or an address (http://...)"
        )
    return "reward_verifier", text


def _weights(wanted: Any, count: int) -> list[float | None]:
    if wanted is None:
        return [None] * count
    weights = [wanted] if isinstance(wanted, int | float | str) else list(wanted)
    if len(weights) != count:
        raise UserError(f"--reward_weights has {len(weights)} numbers for {count} rewards: give one for each")
    try:
        return [float(weight) for weight in weights]
    except (TypeError, ValueError):
        raise UserError(f"--reward_weights takes numbers, not {wanted!r:.60}") from None


def _in_order(places: Mapping[str, Sequence[tuple[str, float | None]]]) -> list[float | None]:
    servers = {weight for _, weight in places["remote_rm_url"]}
    if len(servers) > 1:
        raise UserError("--reward_weights: servers share the samples and are one reward; give them one weight")
    return [weight for name in OPTIONS[:2] for _, weight in places[name]] + list(servers)
