"""How a request wants its turn drawn and shown: the same fields in every protocol."""

import dataclasses
import logging
from dataclasses import dataclass
from typing import Any

from trimtab.rollout.types import MOST_ALTERNATIVES, Sampling
from trimtab.serving.fields import Fields
from trimtab.serving.refusals import NotUnderstood

log = logging.getLogger(__name__)

MOST_ANSWERS = 128
COLDEST = 0.01  # below, and above 0, probabilities leave the range of numbers
OF_THE_RUN = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "logit_bias", "min_tokens")
NOT_OFFERED = ("presence_penalty", "frequency_penalty")


@dataclass(frozen=True)
class Wanted:
    sampling: Sampling  # but for the number of tokens
    limit: int | None  # new tokens; None: as many as there is room for
    seed: int | None
    answers: int = 1
    log_probs: bool = False
    names_as_ids: bool = False  # "token_id:7" in place of a token's text
    token_ids: bool = False
    special_tokens: bool = False  # shown in texts
    stop_strings_shown: bool = False
    stream: bool = False
    stream_usage: bool = False

    def within(self, room: int) -> Sampling:
        """For a prompt behind which so many tokens have room."""
        limit = room if self.limit is None else min(self.limit, room)
        return dataclasses.replace(self.sampling, max_new_tokens=limit)


@dataclass
class House:
    """What a server knows of drawing, whoever asks."""

    stops: tuple[int, ...]  # tokens that end a turn
    vocabulary: int
    pinned: Sampling | None = None
    """In training: how the run draws. Of requests only lengths and stops count."""
    told: set[str] = dataclasses.field(default_factory=set)  # of the rest, what somebody was told does not


def of_chat(fields: Fields, house: House) -> Wanted:
    alternatives = fields.whole("top_logprobs", 0, 0, MOST_ALTERNATIVES)
    shown = fields.flag("logprobs") or alternatives > 0
    return _wanted(fields, house, alternatives, shown)


def of_completion(fields: Fields, house: House) -> Wanted:
    for name in ("echo", "use_beam_search"):
        if fields.flag(name):
            raise NotUnderstood(f"{name} is not offered; leave it out", name)
    if fields.text("suffix"):
        raise NotUnderstood("suffix is not offered; leave it out", "suffix")
    return _wanted(fields, house, fields.whole("logprobs", 0, 0, MOST_ALTERNATIVES), "logprobs" in fields)


def of_generation(fields: Fields, house: House) -> Wanted:
    """Of the protocol that speaks in tokens alone."""
    asked = fields.part("sampling_params")
    count = asked.whole("logprobs", 1, 0, MOST_ALTERNATIVES)
    # One is how clients ask for the log-prob of the token that was drawn, which is there anyway.
    wanted = _wanted(asked, house, count if count > 1 else 0, True)
    return dataclasses.replace(wanted, names_as_ids=True, token_ids=True, stream=fields.flag("stream"))


def _wanted(fields: Fields, house: House, alternatives: int, log_probs: bool) -> Wanted:
    for name in NOT_OFFERED:
        if fields.number(name, 0.0, -100, 100) and house.pinned is None:
            raise NotUnderstood(f"{name} is not offered; leave it out, or give repetition_penalty", name)
    longest = fields.optional_whole("max_tokens", 1)
    longest = fields.optional_whole("max_completion_tokens", 1) or longest
    if house.pinned is not None:
        most = house.pinned.max_new_tokens
        longest = most if longest is None else min(longest, most)
    return Wanted(
        sampling=_sampling(fields, house, alternatives),
        limit=longest,
        seed=fields.optional_whole("seed", -(2**63)),
        answers=fields.whole("n", 1, 1, MOST_ANSWERS),
        log_probs=log_probs,
        # Who wants ids takes texts in their place for a sign that log-probs are not those of the temperature.
        names_as_ids=fields.flag("return_tokens_as_token_ids", fields.flag("return_token_ids")),
        token_ids=fields.flag("return_token_ids"),
        special_tokens=not fields.flag("skip_special_tokens", True),
        stop_strings_shown=fields.flag("include_stop_str_in_output"),
        stream=fields.flag("stream"),
        stream_usage=fields.part("stream_options").flag("include_usage"),
    )


def _sampling(fields: Fields, house: House, alternatives: int) -> Sampling:
    own_stops = fields.ids("stop_token_ids") if "stop_token_ids" in fields else []
    if any(not 0 <= token < house.vocabulary for token in own_stops):
        raise fields.wrong("stop_token_ids", f"a list of token ids below {house.vocabulary}")
    stops = (() if fields.flag("ignore_eos") else house.stops) + tuple(own_stops)
    ends: dict[str, Any] = {
        "stop_token_ids": tuple(dict.fromkeys(stops)),
        "stop_strings": fields.texts("stop"),
        "top_log_probs": alternatives,
    }
    if house.pinned is not None:
        ignored = [name for name in OF_THE_RUN if name in fields]
        if ignored and not house.told:
            house.told.update(ignored)
            log.warning("%s: requests do not say that in training, the run's options do", ", ".join(ignored))
        return dataclasses.replace(house.pinned, n=1, **ends)
    temperature = fields.number("temperature", 1.0, 0, 100)
    return Sampling(
        temperature=max(temperature, COLDEST) if temperature else 0.0,
        top_p=max(fields.number("top_p", 1.0, 0, 1), 1e-6),
        top_k=max(fields.whole("top_k", 0, -1), 0),
        min_p=fields.number("min_p", 0.0, 0, 1),
        repetition_penalty=fields.number("repetition_penalty", 1.0, 0.01, 100),
        min_new_tokens=fields.whole("min_tokens", 0, 0),
        logit_bias=_bias(fields, house.vocabulary),
        **ends,
    )


def _bias(fields: Fields, vocabulary: int) -> dict[int, float]:
    given = fields.part("logit_bias")
    bias: dict[int, float] = {}
    for name in given.body:
        if not name.isdecimal() or len(name) > 12 or int(name) >= vocabulary:
            raise NotUnderstood(
                f"logit_bias names the token {name[:20]!r}, and ids are below {vocabulary}", "logit_bias"
            )
        bias[int(name)] = given.number(name, 0.0, -100, 100)
    return bias
