"""How may this model be run? Ask it, with two short samples, before training.

The packed path is taken only if attention was called once a layer, with no argument we would drop, and the log-probs
equal those of Hugging Face's own forward pass on each sample alone. Otherwise the padded path, if its log-probs are
right; otherwise the model's own logits.

The samples are short, so that the check costs next to nothing. Limits that a configuration names (windows, chunks,
lengths beyond which rotary frequencies change) are made shorter still while it runs, for the reference too: what a
model does beyond them is tried without samples of thousands of tokens.
"""

import contextlib
import copy
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from trimtab.data.batches import TokenBatch
from trimtab.errors import UserError
from trimtab.models.attention import NAME, UnsupportedAttention, register
from trimtab.models.packed import PackedModel, Path
from trimtab.models.recomputing import layers_of
from trimtab.models.rotary import ORIGINAL, rotary_limits


@dataclass(frozen=True)
class Verdict:
    path: Path
    reason: str  # why not a better path; empty for the packed one
    difference: float  # largest |our log-prob - Hugging Face's| on the path taken


LENGTHS = (9, 6)
SMALL_WINDOW = 4  # both sequences are longer
SMALL_POSITIONS = 7  # one sequence is longer
WINDOWS = ("sliding_window", "attention_chunk_size")
MIXERS = re.compile("attn|attention|mixer|mamba|conv|recurrent|temporal|delta|lstm")


def choose_path(root: PackedModel, *, packed_allowed: bool = True) -> Verdict:
    """Decide the path, and leave the model set up for it. Runs in eval mode; the mode is restored."""
    was_training = root.training
    root.eval()
    try:
        with torch.no_grad(), small_limits(root.inner):
            verdict = _choose(root, packed_allowed)
    finally:
        root.train(was_training)
    root.path, root.not_packed = verdict.path, verdict.reason
    return verdict


def _choose(root: PackedModel, packed_allowed: bool) -> Verdict:
    causal = root.inner
    native = causal.config._attn_implementation
    # Eager attention is each model's definition; SDPA silently drops Gemma-2's soft cap, for one.
    by_definition = "eager" if packed_allowed and causal._can_set_attn_implementation() else native
    candidates: list[tuple[Path, str]] = [("padded", native), ("padded", by_definition), ("logits", by_definition)]
    if packed_allowed:
        register()
        candidates.insert(0, ("packed", NAME))
    use_attention(causal, by_definition)
    probe = probing_batch(root.config, root.device, LENGTHS)
    reference = root.reference_values(probe)
    # Rounding grows with the values; half precision is looked at only where there is nothing better (4-bit weights).
    rounding = 3e-5 if next(root.parameters()).dtype == torch.float32 else 2e-2
    tolerance = rounding * max(3.0, reference.abs().max().item())
    reasons = [] if packed_allowed else ["--attn_implementation asks for another attention (leave it out)"]
    for root.path, implementation in candidates:
        use_attention(causal, implementation)
        problem, difference = _try(root, probe, reference, tolerance)
        if not problem:
            return Verdict(root.path, reasons[0] if reasons else "", difference)
        reasons.append(problem)
    raise UserError(f"--pretrain: {type(causal).__name__} cannot be run here: {reasons[-1]}; use another model")


@contextlib.contextmanager
def small_limits(model: nn.Module) -> Iterator[None]:
    """Inside, the limits that the model's configuration names are shorter than the longest sequence that is tried."""
    before: list[tuple[dict, dict]] = []

    def lower(values: dict, limit: int, *names: str) -> None:
        lowered = [name for name in names if isinstance(values.get(name), int | Tensor) and values[name] > limit]
        before.append((values, {name: values[name] for name in lowered}))
        values.update(dict.fromkeys(lowered, limit))

    modules = list(model.modules())
    named: list[Any] = [m.config for m in modules if hasattr(getattr(m, "config", None), "get_text_config")]
    configs: dict[int, Any] = {id(c): c for config in named for c in (config, config.get_text_config())}
    try:
        for holder in (*configs.values(), *modules):
            aliases = getattr(holder, "attribute_map", {})
            lower(vars(holder), SMALL_WINDOW, *(aliases.get(name, name) for name in WINDOWS))
        for module in modules:
            if limits := rotary_limits(module):
                before.append((module._buffers, dict(module._buffers)))  # frequencies follow the length
                lower(vars(module), SMALL_POSITIONS, "original_max_seq_len", "max_seq_len_cached")
                config, dynamic = module.config, "dynamic" in str(module.rope_type)
                lower(vars(config), SMALL_POSITIONS, ORIGINAL, *["max_position_embeddings"] * dynamic)
                before.append((vars(config), {"rope_parameters": config.rope_parameters}))
                config.rope_parameters = copy.deepcopy(config.rope_parameters)
                for kind in limits:
                    rope = config.rope_parameters if kind is None else config.rope_parameters[kind]
                    lower(rope, SMALL_POSITIONS, ORIGINAL)
        yield
    finally:
        for values, were in reversed(before):
            values.update(were)


def use_attention(causal: nn.Module, implementation: str) -> None:
    if causal.config._attn_implementation != implementation and causal._can_set_attn_implementation():
        causal.set_attn_implementation(implementation)


def _try(root: PackedModel, probe: TokenBatch, reference: Tensor, tolerance: float) -> tuple[str, float]:
    """Why this path will not do (empty: it will), and how far its log-probs are from the reference."""
    callers: list[nn.Module] = []
    root.attention.callers = callers
    try:
        values = root.check_values(probe)
    except UnsupportedAttention as error:
        return str(error), float("inf")
    except (AttributeError, TypeError, ValueError, RuntimeError, IndexError) as error:
        return f"{_failed_in(error)} fails in {root.path} rows ({' '.join(str(error).split())[:120]})", float("inf")
    finally:
        root.attention.callers = None
    if root.path == "packed" and len(callers) != root.config.get_text_config().num_hidden_layers:
        return _called_otherwise(root, callers), float("inf")
    difference = _difference(values, reference)
    if difference <= tolerance:
        return "", difference
    return f"{root.path} values differ from Hugging Face's by {difference:.2g}", difference


def _failed_in(error: Exception) -> str:
    """The innermost module in whose forward pass an error was raised."""
    trace, found = error.__traceback__, "the model"
    while trace is not None:
        module = trace.tb_frame.f_locals.get("self")
        if isinstance(module, nn.Module) and not isinstance(module, PackedModel):
            found = type(module).__name__
        trace = trace.tb_next
    return found


def _called_otherwise(root: PackedModel, callers: list[nn.Module]) -> str:
    """Which layers do not attend once each by way of transformers' attention interface."""
    layers, by = layers_of(root.inner), set(callers)
    without = [layer for layer in layers if not by & set(layer.modules())]
    if without or not callers:
        kinds = sorted({_mixer(layer) for layer in without}) or [type(root.inner).__name__]
        return f"{' and '.join(kinds)} does not use transformers' attention interface"
    number = root.config.get_text_config().num_hidden_layers
    return f"{type(callers[0]).__name__} attends {len(callers)} times in {number} layers"


def _mixer(layer: nn.Module) -> str:
    """The kind of module by which a layer mixes tokens, going by its name."""
    named = [type(part).__name__ for name, part in layer.named_modules() if MIXERS.search(name) and "norm" not in name]
    return named[0] if named else type(layer).__name__


def probing_batch(config, device: torch.device, lengths: Sequence[int]) -> TokenBatch:
    """Sequences of these lengths, whose tokens are always the same ones."""
    rng = np.random.default_rng(0)
    text = config.get_text_config()
    vocabulary, padding = text.vocab_size, getattr(text, "pad_token_id", None)
    examples = []
    for length in lengths:
        ids = rng.integers(0, vocabulary, length)
        if padding is not None:  # classifiers look past it
            ids[ids == padding] = (padding + 1) % vocabulary
        examples.append((ids, np.ones(length, dtype=bool)))
    return TokenBatch.of(examples).to(device)


def _difference(ours: Tensor, reference: Tensor) -> float:
    # Weights that are not finite say nothing about the path; the loop reports them.
    gaps = (ours.float() - reference)[reference.isfinite()].abs()
    return gaps.max().item() if gaps.numel() else 0.0
