"""Drawing for rows that each have a setting of their own: the rule of sampler.py, with numbers that differ by row.

What all rows must do alike (whether anything is filtered, whether anybody waits) is the kind of the draw, known to the
host; the numbers are tensors.
"""

import math
from collections.abc import Sequence
from operator import is_
from typing import NamedTuple

import torch
from torch import Tensor

from trimtab.distributed.device import has_kernels
from trimtab.rollout.builtin.sampler import Drawn, drawn_from, likely_enough, log_probs_of, with_log_probs
from trimtab.rollout.types import Sampling


class Kind(NamedTuple):
    """What is done for all rows because one of them asks for it."""

    filtered: bool  # top_k, top_p, min_p
    waits: bool  # min_new_tokens
    stops: int  # the most stop tokens that one has
    plain: bool
    likely: int  # the most alternatives that one asks for

    @classmethod
    def of(cls, settings: Sequence[Sampling]) -> "Kind":
        return cls(
            any(s.temperature > 0 and (s.top_k > 0 or s.top_p < 1 or s.min_p > 0) for s in settings),
            any(s.min_new_tokens > 0 and s.stop_token_ids for s in settings),
            max(len(s.stop_token_ids) for s in settings),
            any(s.plain_log_probs for s in settings),
            max(s.top_log_probs for s in settings),
        )

    @property
    def is_plain(self) -> bool:
        """Nothing but a temperature lies between logits and draw, or the most likely token is taken."""
        return not (self.filtered or self.waits or self.likely)

    def covers(self, other: "Kind") -> bool:
        return all(own >= others for own, others in zip(self, other))

    def together_with(self, other: "Kind") -> "Kind":
        sizes = max(self.stops, other.stops), self.plain or other.plain, max(self.likely, other.likely)
        return Kind(self.filtered or other.filtered, self.waits or other.waits, *sizes)


def numbers_of(setting: Sampling) -> tuple[float, ...]:
    """What `RowSampler` has of a row."""
    greedy, least = setting.temperature == 0, math.log(setting.min_p) if setting.min_p > 0 else -math.inf
    return setting.temperature or 1.0, greedy, setting.top_k, setting.top_p, least, setting.min_new_tokens


class RowSampler:
    def __init__(self, settings: Sequence[Sampling], device: torch.device):
        self.kind = Kind.of(settings)
        self.numbers_BN = torch.tensor([numbers_of(s) for s in settings], dtype=torch.float32, device=device)
        self.stops_BK = _padded([s.stop_token_ids for s in settings], -1, torch.long, device)
        biases = [{**s.logit_bias, **dict.fromkeys(s.forbidden_tokens, -math.inf)} for s in settings]
        self.bias: tuple[Tensor, Tensor] | None = None
        if any(biases):
            tokens = _padded([list(bias) for bias in biases], 0, torch.long, device)
            self.bias = tokens, _padded([list(bias.values()) for bias in biases], 0.0, torch.float32, device)
        self.penalties_B1 = torch.tensor([[s.repetition_penalty] for s in settings], device=device)
        self._followed: list[Sampling] = []

    @classmethod
    def blank(cls, kind: Kind, rows: int, device: torch.device) -> "RowSampler":
        """For at most so many rows of this kind, which are told before every draw; without biases and penalties."""
        made = cls([Sampling()] * rows, device)
        made.kind, made.stops_BK = kind, torch.full((rows, kind.stops), -1, device=device)
        return made

    def follow(self, settings: Sequence[Sampling]) -> None:
        """The first rows have these settings from now on, the others none; in the tensors that there are."""
        if len(settings) == len(self._followed) and all(map(is_, settings, self._followed)):
            return
        self._followed = list(settings)
        others = [Sampling()] * (len(self.numbers_BN) - len(settings))
        rows = [*settings, *others]
        self.numbers_BN.copy_(torch.tensor([numbers_of(s) for s in rows], dtype=torch.float32))
        if self.kind.stops:
            self.stops_BK.copy_(torch.tensor([_filled(s.stop_token_ids, self.kind.stops, -1) for s in rows]))

    @property
    def plain(self) -> bool:
        return self.kind.plain

    def stops_of(self, rows: int) -> Tensor:
        """Tokens that end each of so many rows: its own [rows, K]."""
        return self.stops_BK[:rows]

    def draw(self, logits_BV: Tensor, seeds_B: Tensor, drawn_B: Tensor, seen_BV: Tensor | None) -> Drawn:
        """As Sampler.draw."""
        raw = logits_BV.float()
        temperature, greedy, top_k, top_p, least, _ = self.numbers_BN[: len(raw)].split(1, dim=1)
        if has_kernels(raw.device) and self.bias is None and seen_BV is None and self.kind.is_plain:
            return self._draw_by_kernel(raw, seeds_B, drawn_B)
        chosen_from = self._adjusted(raw, drawn_B, seen_BV) / temperature
        first = chosen_from.argmax(-1)
        if self.kind.filtered:
            chosen_from = _filtered(likely_enough(chosen_from, least), top_k, top_p)
        tokens = torch.where(greedy[:, 0] > 0, first, drawn_from(chosen_from, seeds_B, drawn_B))
        return with_log_probs(tokens, raw / temperature, raw, plain=self.kind.plain, likely=self.kind.likely)

    def _draw_by_kernel(self, logits_BV: Tensor, seeds_B: Tensor, drawn_B: Tensor) -> Drawn:
        from trimtab.rollout.builtin.kernels.sampling import draw_plainly

        temperature, greedy = self.numbers_BN[: len(logits_BV), :2].unbind(1)
        tokens, log_probs = draw_plainly(logits_BV, seeds_B, drawn_B, temperature)
        picked, first = logits_BV.gather(-1, tokens[:, None])[:, 0], logits_BV.max(-1)
        log_probs = torch.where(greedy > 0, log_probs + (first.values - picked) / temperature, log_probs)
        tokens = torch.where(greedy > 0, first.indices, tokens)
        return Drawn(tokens, log_probs, log_probs_of(logits_BV, tokens) if self.kind.plain else None)

    def _adjusted(self, logits: Tensor, drawn_B: Tensor, seen_BV: Tensor | None) -> Tensor:
        if seen_BV is not None:
            penalty = self.penalties_B1
            logits = torch.where(seen_BV, torch.where(logits > 0, logits / penalty, logits * penalty), logits)
        if self.bias is not None:
            logits = logits.scatter_add(1, *self.bias)
        if self.kind.waits:
            # Minus infinity at stop tokens that must wait; infinity, which is nobody's least, everywhere else.
            stops = self.stops_of(len(logits))
            early = (drawn_B < self.numbers_BN[: len(logits), 5])[:, None] & (stops >= 0)
            limits = torch.full_like(stops, math.inf, dtype=logits.dtype).masked_fill(early, -math.inf)
            logits = logits.scatter_reduce(1, stops.clamp(min=0), limits, "amin")
        return logits


def _filtered(logits: Tensor, top_k_B1: Tensor, top_p_B1: Tensor) -> Tensor:
    """As in sampler.py, row by row."""
    ordered, places = logits.sort(-1, descending=True)
    rank = torch.arange(logits.shape[-1], device=logits.device)
    ordered = ordered.masked_fill((top_k_B1 > 0) & (rank >= top_k_B1), -math.inf)
    shares = ordered.softmax(-1)
    keep = (shares.cumsum(-1) - shares < top_p_B1) | (top_p_B1 >= 1)
    return torch.full_like(logits, -math.inf).scatter(-1, places, ordered.masked_fill(~keep, -math.inf))


def _padded(rows: Sequence[Sequence[float]], filling: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    width = max(len(row) for row in rows)
    return torch.tensor([_filled(row, width, filling) for row in rows], dtype=dtype, device=device)


def _filled(row: Sequence[float], width: int, filling: float) -> list[float]:
    return [*row, *[filling] * (width - len(row))]
