"""From logits to tokens, exactly and reproducibly.

A sequence draws one number a token, u = hash(its seed, the position), and takes the token whose share of the cumulated
probabilities u falls into. Its stream is its own: what else is in the batch changes nothing.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from trimtab.distributed.device import has_kernels
from trimtab.rollout.types import Sampling


def uniform(seeds_B: Tensor, positions_B: Tensor) -> Tensor:
    """A number in [0, 1) for each (seed, position): two rounds of the splitmix64 mixer, the top 24 bits."""
    x = _mix(seeds_B + _wrapped(0x9E3779B97F4A7C15) * (positions_B + 1))
    return ((_mix(x) >> 40) & 0xFFFFFF).float() / 2**24  # exact


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shifted(x, 30)) * _wrapped(0xBF58476D1CE4E5B9)
    x = (x ^ _shifted(x, 27)) * _wrapped(0x94D049BB133111EB)
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, bits: int) -> Tensor:
    """Logical right shift of int64."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _wrapped(constant: int) -> int:
    return constant - 2**64 if constant >= 2**63 else constant


@dataclass
class Drawn:
    tokens_B: Tensor
    log_probs_B: Tensor
    plain_B: Tensor | None  # log-probs at temperature 1, where asked for
    likely_BK: tuple[Tensor, Tensor] | None = None  # the most likely tokens and their log-probs, where asked for

    @classmethod
    def stacked(cls, steps: list["Drawn"]) -> "Drawn":
        """Of several steps: [B, steps] each, and [B, steps, K]."""
        plain = None if steps[0].plain_B is None else torch.stack([s.plain_B for s in steps], 1)
        found = cls(torch.stack([s.tokens_B for s in steps], 1), torch.stack([s.log_probs_B for s in steps], 1), plain)
        if likely := [step.likely_BK for step in steps if step.likely_BK is not None]:
            found.likely_BK = torch.stack([t for t, _ in likely], 1), torch.stack([p for _, p in likely], 1)
        return found

    def on_host(self, rows: int) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """Tokens, log-probs and plain log-probs as [rows, steps]."""

        def host(values_B: Tensor) -> np.ndarray:
            return values_B.cpu().numpy().reshape(rows, -1)

        return host(self.tokens_B), host(self.log_probs_B), None if self.plain_B is None else host(self.plain_B)

    def likely_on_host(self, rows: int) -> tuple[np.ndarray, np.ndarray] | None:
        """The most likely tokens and their log-probs as [rows, steps, K]."""
        if self.likely_BK is None:
            return None
        tokens, log_probs = (x.cpu().numpy().reshape(rows, -1, x.shape[-1]) for x in self.likely_BK)
        return tokens.astype(np.int32), log_probs


class Sampler:
    """One sampling setting, ready for logits of one vocabulary."""

    def __init__(self, sampling: Sampling, vocabulary: int, device: torch.device):
        self.sampling = sampling
        self.bias = None
        if sampling.logit_bias or sampling.forbidden_tokens:
            self.bias = torch.zeros(vocabulary, device=device)
            for token, value in sampling.logit_bias.items():
                self.bias[token] = value
            self.bias[list(sampling.forbidden_tokens)] = float("-inf")
        self.stops = torch.tensor(sampling.stop_token_ids, dtype=torch.long, device=device)
        # Nothing but a temperature between the model's logits and the draw, once an answer may end.
        self.plainly = (
            sampling.temperature > 0
            and self.bias is None
            and (sampling.top_k, sampling.top_p, sampling.min_p, sampling.repetition_penalty) == (0, 1, 0, 1)
        )
        self.waits = sampling.min_new_tokens > 0 and bool(sampling.stop_token_ids)
        self.plain = sampling.plain_log_probs

    def stops_of(self, rows: int) -> Tensor:
        """Tokens that end each of so many rows: the same ones [K]."""
        return self.stops

    def draw(self, logits_BV: Tensor, seeds_B: Tensor, drawn_B: Tensor, seen_BV: Tensor | None) -> Drawn:
        """`drawn_B`: how many tokens each sequence has drawn; `seen_BV`: tokens it has had (repetition penalty)."""
        sampling = self.sampling
        raw = logits_BV.float()
        if self.plainly and has_kernels(raw.device):
            return self._draw_by_kernel(raw, seeds_B, drawn_B)
        temperature = sampling.temperature or 1.0
        logits = raw if temperature == 1.0 else raw / temperature
        chosen_from = self._adjusted(raw, drawn_B, seen_BV)
        if temperature != 1.0:
            chosen_from = chosen_from / temperature
        if sampling.temperature == 0:
            tokens = chosen_from.argmax(-1)
        else:
            if sampling.min_p > 0:
                chosen_from = likely_enough(chosen_from, math.log(sampling.min_p))
            if sampling.top_k > 0 or sampling.top_p < 1:
                chosen_from = _filtered(chosen_from, sampling.top_k, sampling.top_p)
            tokens = drawn_from(chosen_from, seeds_B, drawn_B)
        return with_log_probs(tokens, logits, raw, plain=sampling.plain_log_probs, likely=sampling.top_log_probs)

    def _draw_by_kernel(self, logits_BV: Tensor, seeds_B: Tensor, drawn_B: Tensor) -> Drawn:
        from trimtab.rollout.builtin.kernels.sampling import draw_plainly

        temperature = self.sampling.temperature
        if not self.waits:
            tokens, log_probs = draw_plainly(logits_BV, seeds_B, drawn_B, temperature)
        else:  # without stop tokens, in place and for the draw alone; then what they weigh is put back
            early_B, stops_BK = drawn_B < self.sampling.min_new_tokens, logits_BV[:, self.stops]
            logits_BV[:, self.stops] = stops_BK.masked_fill(early_B[:, None], float("-inf"))
            tokens, drawn_from = draw_plainly(logits_BV, seeds_B, drawn_B, temperature)
            logits_BV[:, self.stops] = stops_BK
            picked = logits_BV.gather(-1, tokens[:, None])[:, 0] / temperature
            whole = torch.logaddexp(picked - drawn_from, (stops_BK / temperature).logsumexp(-1))
            log_probs = torch.where(early_B, picked - whole, drawn_from)
        plain = log_probs_of(logits_BV, tokens) if self.sampling.plain_log_probs else None
        most = self.sampling.top_log_probs
        return Drawn(tokens, log_probs, plain, likeliest(logits_BV / temperature, most) if most else None)

    def _adjusted(self, logits: Tensor, drawn_B: Tensor, seen_BV: Tensor | None) -> Tensor:
        """What tokens are chosen from: the model's logits with everything the setting asks for."""
        sampling = self.sampling
        if seen_BV is not None:
            penalty = sampling.repetition_penalty
            logits = torch.where(seen_BV, torch.where(logits > 0, logits / penalty, logits * penalty), logits)
        if self.bias is not None:
            logits = logits + self.bias
        if self.waits:
            early = (drawn_B < sampling.min_new_tokens)[:, None]
            logits = logits.index_fill(1, self.stops, float("-inf")).where(early, logits)
        return logits


def with_log_probs(tokens_B: Tensor, logits_BV: Tensor, raw_BV: Tensor, *, plain: bool, likely: int) -> Drawn:
    """`logits_BV`: at the temperature; `raw_BV`: at 1, for the plain ones; `likely`: so many most likely tokens."""
    at_one = log_probs_of(raw_BV, tokens_B) if plain else None
    return Drawn(tokens_B, log_probs_of(logits_BV, tokens_B), at_one, likeliest(logits_BV, likely) if likely else None)


def drawn_from(logits_BV: Tensor, seeds_B: Tensor, drawn_B: Tensor) -> Tensor:
    shares = logits_BV.softmax(-1).cumsum(-1)
    u = uniform(seeds_B, drawn_B).to(shares.dtype)[:, None] * shares[:, -1:]
    return torch.searchsorted(shares, u, right=True)[:, 0].clamp(max=logits_BV.shape[-1] - 1)


def log_probs_of(logits_BV: Tensor, tokens_B: Tensor) -> Tensor:
    return logits_BV.gather(-1, tokens_B[:, None])[:, 0] - logits_BV.logsumexp(-1)


def likeliest(logits_BV: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """So many tokens, as far as there are, and their log-probs."""
    top = logits_BV.topk(min(count, logits_BV.shape[-1]), -1)
    return top.indices, top.values - logits_BV.logsumexp(-1, keepdim=True)


def likely_enough(logits_BV: Tensor, log_share: float | Tensor) -> Tensor:
    """Everything below this share of the most likely token's probability at minus infinity."""
    return logits_BV.masked_fill(logits_BV < logits_BV.amax(-1, keepdim=True) + log_share, float("-inf"))


def _filtered(logits: Tensor, top_k: int, top_p: float) -> Tensor:
    """Everything but the most likely tokens at minus infinity."""
    ordered, places = logits.sort(-1, descending=True)
    keep = torch.ones_like(ordered, dtype=torch.bool)
    if top_k > 0:
        keep[:, top_k:] = False
        ordered = ordered.masked_fill(~keep, float("-inf"))
    if top_p < 1:
        shares = ordered.softmax(-1)
        keep &= shares.cumsum(-1) - shares < top_p  # the token that crosses the line stays
    return torch.full_like(logits, float("-inf")).scatter(-1, places, ordered.masked_fill(~keep, float("-inf")))
