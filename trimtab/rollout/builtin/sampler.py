"""The sampler: from logits to tokens, exactly and reproducibly.

A sequence uses one number for each token, u = hash(seed, position), and takes the token at which the cumulative
probability exceeds u. So the rest of the batch changes nothing. `Sampler` has the same parameters for all rows;
`PerRequestSampler` has tensors of parameters, one entry for each row, and `SamplingFeatures` says what any of its rows
needs.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from operator import is_
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from trimtab.distributed.device import has_kernels
from trimtab.models.lm_head import PLAIN, read_logits
from trimtab.rollout.builtin.scheduler import SequenceState
from trimtab.rollout.sampling import SamplingParams


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
class SamplerOutput:
    """Sampled tokens with their log-probs."""

    tokens_B: Tensor
    log_probs_B: Tensor
    plain_B: Tensor | None  # log-probs at temperature 1, if requested
    likely_BK: tuple[Tensor, Tensor] | None = None  # the most likely tokens and their log-probs, if requested

    @classmethod
    def stacked(cls, steps: list["SamplerOutput"]) -> "SamplerOutput":
        """Several steps: [B, steps] each, and [B, steps, K]."""
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
    """Samples all rows with the same parameters."""

    def __init__(self, sampling: SamplingParams, vocabulary: int, device: torch.device):
        self.sampling = sampling
        self.bias = None
        if sampling.logit_bias or sampling.forbidden_tokens:
            self.bias = torch.zeros(vocabulary, device=device)
            for token, value in sampling.logit_bias.items():
                self.bias[token] = value
            self.bias[list(sampling.forbidden_tokens)] = float("-inf")
        self.stops = torch.tensor(sampling.stop_token_ids, dtype=torch.long, device=device)
        # Only a temperature is applied to the logits, once an answer may end.
        self.plainly = (
            sampling.temperature > 0
            and self.bias is None
            and (sampling.top_k, sampling.top_p, sampling.min_p, sampling.repetition_penalty) == (0, 1, 0, 1)
        )
        self.waits = sampling.min_new_tokens > 0 and bool(sampling.stop_token_ids)
        self.plain = sampling.plain_log_probs

    def stops_of(self, rows: int) -> Tensor:
        """Stop tokens of all rows [K]."""
        return self.stops

    def draw(self, logits_BV: Tensor, seeds_B: Tensor, drawn_B: Tensor, seen_BV: Tensor | None) -> SamplerOutput:
        """`drawn_B`: how many tokens each sequence has drawn; `seen_BV`: tokens it has had (repetition penalty)."""
        sampling = self.sampling
        raw = logits_BV.float()
        if self.plainly and has_kernels(raw.device):
            return self._draw_by_kernel(raw, seeds_B, drawn_B)
        temperature = sampling.temperature or 1.0
        chosen_from = self._adjusted(raw, drawn_B, seen_BV)
        if temperature != 1.0:
            chosen_from = chosen_from / temperature
        if sampling.temperature == 0:
            tokens = chosen_from.argmax(-1)
        else:
            if sampling.min_p > 0:
                chosen_from = min_p_mask(chosen_from, math.log(sampling.min_p))
            if sampling.top_k > 0 or sampling.top_p < 1:
                chosen_from = _filtered(chosen_from, sampling.top_k, sampling.top_p)
            tokens = sample_from_logits(chosen_from, seeds_B, drawn_B)
        log_probs, most = log_probs_of(raw, tokens, temperature), sampling.top_log_probs
        plain = log_probs_of(raw, tokens) if sampling.plain_log_probs else None
        return SamplerOutput(tokens, log_probs, plain, likeliest(raw / temperature, most) if most else None)

    def _draw_by_kernel(self, logits_BV: Tensor, seeds_B: Tensor, drawn_B: Tensor) -> SamplerOutput:
        from trimtab.rollout.builtin.kernels.decode_step import sample_temperature_only

        temperature = self.sampling.temperature
        if self.waits:  # mask stop tokens in place for sampling, then restore their logits
            early_B, stops_BK = drawn_B < self.sampling.min_new_tokens, logits_BV[:, self.stops]
            logits_BV[:, self.stops] = stops_BK.masked_fill(early_B[:, None], float("-inf"))
        tokens, log_probs = sample_temperature_only(logits_BV, seeds_B, drawn_B, temperature)
        if self.waits:
            logits_BV[:, self.stops] = stops_BK
            log_probs = log_probs_of(logits_BV, tokens, temperature)
        plain = log_probs_of(logits_BV, tokens) if self.sampling.plain_log_probs else None
        most = self.sampling.top_log_probs
        return SamplerOutput(tokens, log_probs, plain, likeliest(logits_BV / temperature, most) if most else None)

    def _adjusted(self, logits: Tensor, drawn_B: Tensor, seen_BV: Tensor | None) -> Tensor:
        """Logits with penalty, bias and minimum length applied."""
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


def sample_from_logits(logits_BV: Tensor, seeds_B: Tensor, drawn_B: Tensor) -> Tensor:
    shares = logits_BV.softmax(-1).cumsum(-1)
    u = uniform(seeds_B, drawn_B).to(shares.dtype)[:, None] * shares[:, -1:]
    return torch.searchsorted(shares, u, right=True)[:, 0].clamp(max=logits_BV.shape[-1] - 1)


def log_probs_of(logits_BV: Tensor, tokens_B: Tensor, temperature: float | Tensor = 1.0) -> Tensor:
    """By the trainer's own function, whose sums do not depend on the other rows."""
    chosen_B, normalisers_B, _ = read_logits(logits_BV, tokens_B, PLAIN, temperature, entropy=False)
    return chosen_B - normalisers_B


def likeliest(logits_BV: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The most likely tokens, at most `count`, and their log-probs."""
    top = logits_BV.topk(min(count, logits_BV.shape[-1]), -1)
    return top.indices, top.values - logits_BV.logsumexp(-1, keepdim=True)


def min_p_mask(logits_BV: Tensor, log_share: float | Tensor) -> Tensor:
    """min_p: tokens below this share of the largest probability at minus infinity."""
    return logits_BV.masked_fill(logits_BV < logits_BV.amax(-1, keepdim=True) + log_share, float("-inf"))


def _filtered(logits: Tensor, top_k: int, top_p: float) -> Tensor:
    """top_k and top_p: all other tokens at minus infinity."""
    ordered, places = logits.sort(-1, descending=True)
    keep = torch.ones_like(ordered, dtype=torch.bool)
    if top_k > 0:
        keep[:, top_k:] = False
        ordered = ordered.masked_fill(~keep, float("-inf"))
    if top_p < 1:
        shares = ordered.softmax(-1)
        keep &= shares.cumsum(-1) - shares < top_p  # the token that crosses top_p stays
    return torch.full_like(logits, float("-inf")).scatter(-1, places, ordered.masked_fill(~keep, float("-inf")))


# ---- sampling parameters by row


class SamplingFeatures(NamedTuple):
    """What must be computed for all rows because one of them needs it. Known to the host; the numbers are tensors."""

    filtered: bool  # top_k, top_p, min_p
    waits: bool  # min_new_tokens
    stops: int  # the largest number of stop tokens
    plain: bool
    likely: int  # the largest number of alternatives

    @classmethod
    def of(cls, settings: Sequence[SamplingParams]) -> "SamplingFeatures":
        return cls(
            any(s.temperature > 0 and (s.top_k > 0 or s.top_p < 1 or s.min_p > 0) for s in settings),
            any(s.min_new_tokens > 0 and s.stop_token_ids for s in settings),
            max(len(s.stop_token_ids) for s in settings),
            any(s.plain_log_probs for s in settings),
            max(s.top_log_probs for s in settings),
        )

    @property
    def is_plain(self) -> bool:
        """Only a temperature is applied, or the most likely token is taken."""
        return not (self.filtered or self.waits or self.likely)

    def covers(self, other: "SamplingFeatures") -> bool:
        return all(own >= others for own, others in zip(self, other))

    def together_with(self, other: "SamplingFeatures") -> "SamplingFeatures":
        sizes = max(self.stops, other.stops), self.plain or other.plain, max(self.likely, other.likely)
        return SamplingFeatures(self.filtered or other.filtered, self.waits or other.waits, *sizes)


def params_row(setting: SamplingParams) -> tuple[float, ...]:
    """Parameters of a row in `PerRequestSampler.numbers_BN`."""
    greedy, least = setting.temperature == 0, math.log(setting.min_p) if setting.min_p > 0 else -math.inf
    return setting.temperature or 1.0, greedy, setting.top_k, setting.top_p, least, setting.min_new_tokens


class PerRequestSampler:
    """Samples each row with its own parameters."""

    def __init__(self, settings: Sequence[SamplingParams], device: torch.device):
        self.kind = SamplingFeatures.of(settings)
        self.numbers_BN = torch.tensor([params_row(s) for s in settings], dtype=torch.float32, device=device)
        self.stops_BK = _padded([s.stop_token_ids for s in settings], -1, torch.long, device)
        biases = [{**s.logit_bias, **dict.fromkeys(s.forbidden_tokens, -math.inf)} for s in settings]
        self.bias: tuple[Tensor, Tensor] | None = None
        if any(biases):
            tokens = _padded([list(bias) for bias in biases], 0, torch.long, device)
            self.bias = tokens, _padded([list(bias.values()) for bias in biases], 0.0, torch.float32, device)
        self.penalties_B1 = torch.tensor([[s.repetition_penalty] for s in settings], device=device)
        self._followed: list[SamplingParams] = []

    @classmethod
    def blank(cls, kind: SamplingFeatures, rows: int, device: torch.device) -> "PerRequestSampler":
        """For at most `rows` rows of this kind, set by `follow` before sampling; without biases and penalties."""
        made = cls([SamplingParams()] * rows, device)
        made.kind, made.stops_BK = kind, torch.full((rows, kind.stops), -1, device=device)
        return made

    def follow(self, settings: Sequence[SamplingParams]) -> None:
        """Set the parameters of the first rows in place; the others get defaults."""
        if len(settings) == len(self._followed) and all(map(is_, settings, self._followed)):
            return
        self._followed = list(settings)
        others = [SamplingParams()] * (len(self.numbers_BN) - len(settings))
        rows = [*settings, *others]
        self.numbers_BN.copy_(torch.tensor([params_row(s) for s in rows], dtype=torch.float32))
        if self.kind.stops:
            self.stops_BK.copy_(torch.tensor([_filled(s.stop_token_ids, self.kind.stops, -1) for s in rows]))

    @property
    def plain(self) -> bool:
        return self.kind.plain

    def stops_of(self, rows: int) -> Tensor:
        """Stop tokens of each row [rows, K]."""
        return self.stops_BK[:rows]

    def draw(self, logits_BV: Tensor, seeds_B: Tensor, drawn_B: Tensor, seen_BV: Tensor | None) -> SamplerOutput:
        """As Sampler.draw."""
        raw = logits_BV.float()
        temperature, greedy, top_k, top_p, least, _ = self.numbers_BN[: len(raw)].split(1, dim=1)
        if has_kernels(raw.device) and self.bias is None and seen_BV is None and self.kind.is_plain:
            return self._draw_by_kernel(raw, seeds_B, drawn_B)
        chosen_from = self._adjusted(raw, drawn_B, seen_BV) / temperature
        first = chosen_from.argmax(-1)
        if self.kind.filtered:
            chosen_from = _filtered_by_row(min_p_mask(chosen_from, least), top_k, top_p)
        tokens = torch.where(greedy[:, 0] > 0, first, sample_from_logits(chosen_from, seeds_B, drawn_B))
        log_probs, most = log_probs_of(raw, tokens, temperature[:, 0]), self.kind.likely
        plain = log_probs_of(raw, tokens) if self.kind.plain else None
        return SamplerOutput(tokens, log_probs, plain, likeliest(raw / temperature, most) if most else None)

    def _draw_by_kernel(self, logits_BV: Tensor, seeds_B: Tensor, drawn_B: Tensor) -> SamplerOutput:
        from trimtab.rollout.builtin.kernels.decode_step import sample_temperature_only

        temperature, greedy = self.numbers_BN[: len(logits_BV), :2].unbind(1)
        tokens, log_probs = sample_temperature_only(logits_BV, seeds_B, drawn_B, temperature)
        picked, first = logits_BV.gather(-1, tokens[:, None])[:, 0], logits_BV.max(-1)
        log_probs = torch.where(greedy > 0, log_probs + (first.values - picked) / temperature, log_probs)
        tokens = torch.where(greedy > 0, first.indices, tokens)
        return SamplerOutput(tokens, log_probs, log_probs_of(logits_BV, tokens) if self.kind.plain else None)

    def _adjusted(self, logits: Tensor, drawn_B: Tensor, seen_BV: Tensor | None) -> Tensor:
        if seen_BV is not None:
            penalty = self.penalties_B1
            logits = torch.where(seen_BV, torch.where(logits > 0, logits / penalty, logits * penalty), logits)
        if self.bias is not None:
            logits = logits.scatter_add(1, *self.bias)
        if self.kind.waits:
            # Minus infinity at masked stop tokens; infinity, which changes no minimum, elsewhere.
            stops = self.stops_of(len(logits))
            early = (drawn_B < self.numbers_BN[: len(logits), 5])[:, None] & (stops >= 0)
            limits = torch.full_like(stops, math.inf, dtype=logits.dtype).masked_fill(early, -math.inf)
            logits = logits.scatter_reduce(1, stops.clamp(min=0), limits, "amin")
        return logits


def _filtered_by_row(logits: Tensor, top_k_B1: Tensor, top_p_B1: Tensor) -> Tensor:
    """`_filtered` with parameters by row."""
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


class SamplerCache:
    """Chooses a sampler for a batch, and keeps the last one."""

    def __init__(self, vocabulary: int, device: torch.device):
        self.vocabulary, self.device = vocabulary, device
        self._last: Sampler | None = None

    def of(self, samples: Sequence[SequenceState]) -> Sampler | PerRequestSampler:
        if not same_params(samples):
            return PerRequestSampler([sample.sampling for sample in samples], self.device)
        setting = samples[0].sampling
        if self._last is None or self._last.sampling.rule != setting.rule:
            self._last = Sampler(setting, self.vocabulary, self.device)
        return self._last

    def seen(self, samples: Sequence[SequenceState]) -> Tensor | None:
        """With a repetition penalty: which tokens each sequence contains [sequences, vocabulary]."""
        if all(sample.sampling.repetition_penalty == 1.0 for sample in samples):
            return None
        texts = [sample.text for sample in samples]
        rows = np.repeat(np.arange(len(texts)), [len(ids) for ids in texts])
        places = torch.from_numpy(np.stack([rows, np.concatenate(texts)])).to(self.device)
        seen = torch.zeros(len(samples), self.vocabulary, dtype=torch.bool, device=self.device)
        seen[places[0], places[1]] = True
        return seen


def same_params(samples: Sequence[SequenceState]) -> bool:
    """Whether all sequences have the same sampling rule."""
    first = samples[0].sampling
    return all(sample.sampling is first or sample.sampling.rule == first.rule for sample in samples)
