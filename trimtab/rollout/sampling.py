"""Sampling parameters, seeds of random streams, stop tokens and stop strings."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from trimtab.errors import UserError

if TYPE_CHECKING:
    from trimtab.models.policy import Policy

MOST_ALTERNATIVES = 20  # as many as vLLM and the protocol of OpenAI give


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are sampled: in a whole call, or in one request with its own parameters."""

    max_new_tokens: int = 128
    n: int = 1
    """Samples of each prompt; its prefill is done once for all of them."""
    temperature: float = 1.0
    """0 takes the most likely token."""
    top_k: int = 0
    """Draw among the k most likely tokens; 0: among all."""
    top_p: float = 1.0
    """Draw among the most likely tokens that together have this probability."""
    min_p: float = 0.0
    """Draw among the tokens that have at least this share of the most likely one's probability; before top_k."""
    min_new_tokens: int = 0
    """No stop token before this many."""
    repetition_penalty: float = 1.0
    stop_token_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    logit_bias: dict[int, float] = field(default_factory=dict)
    forbidden_tokens: tuple[int, ...] = ()
    seed: int = 0
    plain_log_probs: bool = False
    """Also the log-probs at temperature 1."""
    top_log_probs: int = 0
    """How many most likely tokens to return at each position, with their log-probs."""
    prompt_log_probs: int | None = None
    """Also the log-probs of the prompt's tokens, with this many most likely ones at each. No new token is needed then.
    """

    def __post_init__(self) -> None:
        for name, value, least in (
            ("max_new_tokens", self.max_new_tokens, 1 if self.prompt_log_probs is None else 0),
            ("n", self.n, 1),
            ("temperature", self.temperature, 0),
            ("top_k", self.top_k, 0),
            ("min_new_tokens", self.min_new_tokens, 0),
            ("top_log_probs", self.top_log_probs, 0),
            ("prompt_log_probs", self.prompt_log_probs or 0, 0),
        ):
            if value < least:
                raise UserError(f"sampling: {name} is {value}; at least {least} is needed")
        if not 0 < self.top_p <= 1:
            raise UserError(f"sampling: top_p is {self.top_p}; above 0 and at most 1 is needed")
        if not 0 <= self.min_p <= 1:
            raise UserError(f"sampling: min_p is {self.min_p}; between 0 and 1 is needed")
        for name in ("top_log_probs", "prompt_log_probs"):
            if (count := getattr(self, name) or 0) > MOST_ALTERNATIVES:
                raise UserError(f"sampling: {name} is {count}; at most {MOST_ALTERNATIVES} can be had")
        if self.repetition_penalty <= 0:
            raise UserError(f"sampling: repetition_penalty is {self.repetition_penalty}; above 0 is needed")

    @cached_property
    def rule(self) -> tuple:
        """What determines the distribution of the next token: not how many tokens and samples there are, nor stop
        strings."""
        bias = tuple(sorted(self.logit_bias.items()))
        chosen_from = self.temperature, self.top_k, self.top_p, self.min_p, self.repetition_penalty, bias
        ended = self.forbidden_tokens, self.stop_token_ids, self.min_new_tokens
        return chosen_from, ended, self.plain_log_probs, self.top_log_probs


# ---- seeds: every prompt and every sample has its own random stream, in every engine

_BITS = 2**64 - 1


def request_seed(seed: int, request: int) -> int:
    """The seed of request number `request` among the requests that share a seed, as an int64."""
    mixed = _mix((seed + _mix((request + 1) & _BITS)) & _BITS)
    return mixed - 2**64 if mixed >= 2**63 else mixed


def _mix(x: int) -> int:
    """The mixer of splitmix64."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _BITS
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _BITS
    return x ^ (x >> 31)


# ---- where an answer stops

Ids = TypeVar("Ids", list[int], np.ndarray)

_UNREADABLE = "\ufffd"
_UNSURE = 8  # first characters of a decoded tail, which may differ from those of the whole text


def stop_tokens(policy: "Policy", tokenizer: Any) -> tuple[int, ...]:
    """Tokens that end an answer: the tokenizer's end token, if there is one, and those the model's generation config
    names."""
    configured = getattr(policy.inner.generation_config, "eos_token_id", None)
    listed = configured if isinstance(configured, list) else [configured]
    own = None if tokenizer is None else tokenizer.eos_token_id
    return tuple(dict.fromkeys(t for t in [own, *listed] if t is not None))


def check_sampling_params(sampling: SamplingParams, vocabulary: int, tokenizer: Any) -> None:
    """Refuse parameters, possibly of an unknown client, that the model or the tokenizer cannot follow."""
    if sampling.stop_strings and tokenizer is None:
        raise UserError("stop strings need a tokenizer; give the engine one")
    for name, tokens in (
        ("stop_token_ids", sampling.stop_token_ids),
        ("logit_bias", sampling.logit_bias),
        ("forbidden_tokens", sampling.forbidden_tokens),
    ):
        if (strange := next((token for token in tokens if not 0 <= token < vocabulary), None)) is not None:
            raise UserError(f"sampling: {name} has token {strange}, and the model's vocabulary is {vocabulary}")
    if vocabulary == len(set(sampling.forbidden_tokens)):
        raise UserError("sampling: forbidden_tokens are all that the model has; leave it one")


def at_stop_tokens(tokens_BS: np.ndarray, stops: Sequence[tuple[int, ...]]) -> np.ndarray:
    """Mask of stop tokens; each row has its own."""
    if len(set(stops)) == 1:
        return np.isin(tokens_BS, stops[0])
    found = np.zeros(tokens_BS.shape, dtype=bool)
    for own in set(stops):
        rows = [row for row, others in enumerate(stops) if others == own]
        found[rows] = np.isin(tokens_BS[rows], own)
    return found


def stop_string_end(
    ids: Ids, looked: int, minimum: int, stops: Sequence[str], decode: Callable[[Ids], str]
) -> int | None:
    """How many tokens, at least `minimum`, an answer has when its text first contains a stop string; None: not yet.

    The first `looked` tokens were searched before, without a hit. Only the end of the text is decoded first. A hit
    there is confirmed in the whole text, because a tail may decode differently by itself.
    """
    if len(ids) < minimum:
        return None
    # The first `minimum` tokens were not searched, because the answer could not end there.
    start = _tail(ids, looked, max(map(len, stops)), decode) if looked >= minimum else 0
    tail = decode(ids[start:])
    if not any(stop in tail for stop in stops):
        return None
    for end in range(max(looked + 1, minimum), len(ids) + 1):
        text = decode(ids[:end])
        if any(stop in text for stop in stops):
            return end
    return None


def _tail(ids: Ids, looked: int, characters: int, decode: Callable[[Ids], str]) -> int:
    """A token to decode from, so that stop strings of this many characters that end after `looked` are complete.

    The first characters of a tail may differ from the whole text: a space may be missing before its first word. It must
    not begin inside a character either, whose other tokens would all be unreadable.
    """
    reach = characters + _UNSURE
    while reach < looked:
        start = looked - reach
        while start and _UNREADABLE in decode(ids[start : start + 1]):
            start -= 1
        if len(decode(ids[start:looked])) >= characters + _UNSURE:
            return start
        reach *= 2  # some tokens have no characters
    return 0
