"""How may this model be run? Ask it, with two short samples, before training.

The packed path is taken only if attention was called once a layer, with no argument we would drop, and the log-probs
equal those of Hugging Face's own forward pass on each sample alone. Otherwise the padded path, if its log-probs are
right; otherwise the model's own logits.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from trimtab.data.batches import TokenBatch
from trimtab.models.attention import NAME, UnsupportedAttention, calls_since_set, register
from trimtab.models.policy import Path, Policy


@dataclass(frozen=True)
class Verdict:
    path: Path
    reason: str  # why not a better path; empty for the packed one
    difference: float  # largest |our log-prob - Hugging Face's| on the path taken


def choose_path(policy: Policy, *, packed_allowed: bool = True) -> Verdict:
    """Decide the path, and leave the model set up for it. Runs in eval mode; the mode is restored."""
    was_training = policy.training
    policy.eval()
    try:
        with torch.no_grad():
            verdict = _choose(policy, packed_allowed)
    finally:
        policy.train(was_training)
    policy.path = verdict.path
    return verdict


def _choose(policy: Policy, packed_allowed: bool) -> Verdict:
    causal = policy.causal
    native = causal.config._attn_implementation
    # Eager attention is each model's definition; SDPA silently drops Gemma-2's soft cap, for one.
    by_definition = "eager" if packed_allowed and causal._can_set_attn_implementation() else native
    candidates = [("padded", native), ("padded", by_definition), ("logits", by_definition)]
    if packed_allowed:
        register()
        candidates.insert(0, ("packed", NAME))
    _use(causal, by_definition)
    probe = _probe(policy.config, policy.device)
    reference = _reference(policy, probe)
    tolerance = 1e-4 if next(policy.parameters()).dtype == torch.float32 else 0.15
    reasons = [] if packed_allowed else ["another attention implementation was asked for"]
    for policy.path, implementation in candidates:
        _use(causal, implementation)
        problem, difference = _try(policy, probe, reference, tolerance)
        if not problem:
            return Verdict(policy.path, reasons[0] if reasons else "", difference)
        reasons.append(problem)
    raise AssertionError(f"the model disagrees with itself: {reasons[-1]}")


def _use(causal, implementation: str) -> None:
    if causal.config._attn_implementation != implementation and causal._can_set_attn_implementation():
        causal.set_attn_implementation(implementation)


def _try(policy: Policy, probe: TokenBatch, reference: Tensor, tolerance: float) -> tuple[str, float]:
    """Why this path will not do (empty: it will), and how far its log-probs are from the reference."""
    try:
        log_probs = policy(probe).log_probs_N
    except UnsupportedAttention as error:
        return str(error), float("inf")
    calls, layers = calls_since_set(), policy.config.get_text_config().num_hidden_layers
    if policy.path == "packed" and calls != layers:
        return f"our attention was called {calls} times in {layers} layers", float("inf")
    difference = _difference(log_probs, reference)
    if difference <= tolerance:
        return "", difference
    return f"{policy.path} log-probs differ from Hugging Face's by {difference:.2g}", difference


def _probe(config, device: torch.device) -> TokenBatch:
    rng = np.random.default_rng(0)
    vocabulary = config.get_text_config().vocab_size
    examples = []
    for length in (9, 6):
        ids = rng.integers(0, vocabulary, length)
        examples.append((ids, np.ones(length, dtype=bool)))
    return TokenBatch.of(examples).to(device)


def _reference(policy: Policy, probe: TokenBatch) -> Tensor:
    """Hugging Face's own logits, one sample at a time."""
    pieces = []
    for ids in probe.ids_T.split(probe.lengths):
        logits = policy.causal(input_ids=ids[None], use_cache=False).logits[0, :-1].float()
        pieces.append(logits.log_softmax(-1).gather(-1, ids[1:, None])[:, 0])
    return torch.cat(pieces)


def _difference(ours: Tensor, reference: Tensor) -> float:
    return (ours.float() - reference).abs().max().item()
