"""The self-check: choose packed or padded forward passes by comparing two short samples with plain transformers.

The packed path is chosen only if attention is called once per layer, without unsupported arguments, and if the
log-probs equal those of Hugging Face's forward pass on each sample alone. Otherwise the padded path is chosen if its
log-probs are right, and otherwise the model's own logits.

The samples are short, so the check is cheap. Limits in the configuration (windows, chunks, lengths above which rotary
frequencies change) are reduced below the samples' lengths during the check, for the reference too. So it covers the
model's behaviour beyond its limits without samples of thousands of tokens.

If no process has the model's weights, a small model of the same class is checked instead. The right path and the number
of attention calls depend on the code, not on weights or width. But not every family can be made narrow: if that fails,
or results in the logits path, layers of full width decide.
"""

import contextlib
import copy
import math
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor, nn

from trimtab.data.batches import TokenBatch
from trimtab.errors import UserError
from trimtab.models.activation_memory import layers_of
from trimtab.models.attention import NAME, UnsupportedAttention, register
from trimtab.models.packed import PackedModel, Path, cast_parameters, scoring
from trimtab.models.pretrained import first_line
from trimtab.models.recurrent import RecurrentForward, recurrent_modules
from trimtab.models.rotary import ORIGINAL, rotary_limits


@dataclass(frozen=True)
class Verdict:
    """The chosen path of a model."""

    path: Path
    reason: str  # why not a better path; empty for the packed one
    difference: float  # largest |our log-prob - Hugging Face's| on the chosen path
    not_shared: str = ""  # why processes cannot share a packed row


LENGTHS = (9, 6)
SMALL_WINDOW = 4  # both sequences are longer
SMALL_POSITIONS = 7  # one sequence is longer
WINDOWS = ("sliding_window", "attention_chunk_size")
MIXERS = re.compile("attn|attention|mixer|mamba|conv|recurrent|temporal|delta|lstm")


def choose_path(root: PackedModel, *, packed_allowed: bool = True) -> Verdict:
    """Choose the path, and set the model up for it."""
    causal = root.inner
    native = causal.config._attn_implementation
    # Eager attention defines a model; SDPA silently ignores Gemma-2's soft cap, for example.
    by_definition = "eager" if packed_allowed and causal._can_set_attn_implementation() else native
    candidates: list[tuple[Path, str]] = [("padded", native), ("padded", by_definition), ("logits", by_definition)]
    reasons = ["--attn_implementation asks for another attention (leave it out)"]
    if packed_allowed:
        register()
        candidates.insert(0, ("packed", NAME))
        reasons = []
    with scoring(root), lowered_limits(causal):
        use_attention(causal, by_definition)
        probe = probe_batch(root.config, root.device, LENGTHS)
        try:
            reference = root.reference_values(probe)
        except torch.OutOfMemoryError:
            raise
        except FAILURES as error:
            raise UserError(f"--pretrain: {cannot_run(error)}") from error
        # Rounding is relative to the values. Half precision occurs only with 4-bit weights and named implementations.
        rounding = 3e-5 if next(root.parameters()).dtype == torch.float32 else 2e-2
        tolerance = rounding * max(3.0, reference.abs().max().item())
        for root.path, implementation in candidates:
            use_attention(causal, implementation)
            problem, difference = _try(root, probe, reference, tolerance)
            if not problem:
                root.not_packed = reasons[0] if reasons else ""
                return Verdict(root.path, root.not_packed, difference, root.attention.not_shared)
            reasons.append(problem)
    raise UserError(f"--pretrain: {type(causal).__name__} cannot be run here: {reasons[-1]}; use another model")


@contextlib.contextmanager
def lowered_limits(model: nn.Module) -> Iterator[None]:
    """Reduce the limits in the model's configuration below the sample lengths inside the context."""
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
                before.append((module._buffers, dict(module._buffers)))  # frequencies depend on the length
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
    """Why this path fails (empty: it works), and the largest difference of its log-probs from the reference."""
    callers: list[nn.Module] = []
    root.attention.callers = callers
    try:
        values = root.check_values(probe)
    except UnsupportedAttention as error:
        return str(error), float("inf")
    except FAILURES as error:
        return f"{_failed_in(error)} fails in {root.path} rows ({first_line(error)[:120]})", float("inf")
    finally:
        root.attention.callers = None
    recurrent = any(isinstance(vars(module).get("forward"), RecurrentForward) for module in callers)
    if root.path == "packed" and not recurrent and len(callers) != root.config.get_text_config().num_hidden_layers:
        return _attention_problem(root, callers), float("inf")
    # Non-finite weights say nothing about the path; the training loop reports them.
    gaps = (values.float() - reference)[reference.isfinite()].abs()
    difference = gaps.max().item() if gaps.numel() else 0.0
    if difference <= tolerance:
        return "", difference
    return f"{root.path} values differ from Hugging Face's by {difference:.2g}", difference


FAILURES = (AttributeError, TypeError, ValueError, RuntimeError, IndexError)
KERNELS = ("fla", "causal_conv1d", "mamba_ssm")  # packages whose functions transformers calls where they are installed


def needs_accelerator(model: nn.Module) -> bool:
    """Whether layers of the model use kernels that do not run on a CPU."""
    return any(name in sys.modules for name in KERNELS) and bool(recurrent_modules(model))


def cannot_run(error: Exception) -> str:
    """A line on a model whose own code fails, with the kernel packages that may be of another version."""
    found = [
        f"{name} {getattr(sys.modules[name], '__version__', '')}".strip() for name in KERNELS if name in sys.modules
    ]
    cure = f"remove or change the version of {' and '.join(found)}" if found else "use another model"
    return f"{_failed_in(error)} cannot be run by transformers {transformers.__version__}: {first_line(error)}; {cure}"


def _failed_in(error: Exception) -> str:
    """The innermost module whose forward raised the error."""
    trace, found = error.__traceback__, "the model"
    while trace is not None:
        module = trace.tb_frame.f_locals.get("self")
        if isinstance(module, nn.Module) and not isinstance(module, PackedModel):
            found = type(module).__name__
        trace = trace.tb_next
    return found


def _attention_problem(root: PackedModel, callers: list[nn.Module]) -> str:
    """A message on layers that do not call transformers' attention interface exactly once."""
    layers, by = layers_of(root.inner), set(callers)
    without = [layer for layer in layers if not by & set(layer.modules())]
    if without or not callers:
        kinds = sorted({_mixer(layer) for layer in without}) or [type(root.inner).__name__]
        return f"{' and '.join(kinds)} does not use transformers' attention interface"
    number = root.config.get_text_config().num_hidden_layers
    return f"{type(callers[0]).__name__} attends {len(callers)} times in {number} layers"


def _mixer(layer: nn.Module) -> str:
    """The class of the module with which a layer mixes tokens, found by name."""
    named = [type(part).__name__ for name, part in layer.named_modules() if MIXERS.search(name) and "norm" not in name]
    return named[0] if named else type(layer).__name__


def probe_batch(config, device: torch.device, lengths: Sequence[int]) -> TokenBatch:
    """Sequences of these lengths with fixed pseudo-random tokens."""
    rng = np.random.default_rng(0)
    text = config.get_text_config()
    vocabulary, padding = text.vocab_size, getattr(text, "pad_token_id", None)
    examples = []
    for length in lengths:
        ids = rng.integers(0, vocabulary, length)
        if padding is not None:  # classifiers skip padding
            ids[ids == padding] = (padding + 1) % vocabulary
        examples.append((ids, np.ones(length, dtype=bool)))
    return TokenBatch.of(examples).to(device)


# ---- models without weights

LAYERS, VOCABULARY = 2, 1024
HEADS = 2  # key-value heads, and query heads for each of them
EXPERTS = 8  # or twice the experts per token
KEY_VALUE_HEADS = ("num_key_value_heads", "num_kv_heads")
INNER_STEP = 32  # expert kernels need widths that are multiples of this
AS_WIDE = ("word_embed_proj_dim",)  # if it differs from the hidden size, the model has extra modules
INNER = ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size")  # suffixes of the names of inner widths
OF_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")


def choose_path_without_weights(
    module: PackedModel, *, packed_allowed: bool, dtype: torch.dtype, device: torch.device
) -> Verdict:
    """Choose the path of a model without weights, and set it up. `dtype`, `device`: for the check."""

    def check(config: Any) -> tuple[Verdict, str]:
        root = type(module)(_small_model(type(module.inner), config)).to(device)
        cast_parameters(root, dtype)
        return choose_path(root, packed_allowed=packed_allowed), root.config._attn_implementation

    small = with_few_layers(module.config)
    try:
        verdict, attention = check(narrow(small))
    except Exception:  # this family cannot have such a width; the exception depends on the family
        verdict = None
    if verdict is None or verdict.path == "logits":
        verdict, attention = check(small)
    use_attention(module.inner, attention)
    module.path, module.not_packed = verdict.path, verdict.reason
    module.attention.not_shared = verdict.not_shared
    return verdict


def _small_model(kind: type[Any], config: Any) -> nn.Module:
    """A small model with weights large enough for errors to show."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        small = kind._from_config(copy.deepcopy(config), dtype=torch.float32)
        for parameter in small.parameters():
            if parameter.ndim >= 2:
                parameter.normal_(0, parameter.shape[-1] ** -0.5)
    return small


def with_few_layers(config: Any) -> Any:
    """The configuration with few layers, including every layer type, and a small vocabulary."""
    config = copy.deepcopy(config)
    text = config.get_text_config()
    layers, kinds = text.num_hidden_layers, getattr(text, "layer_types", None) or []
    kept = min(layers, max([LAYERS, *(kinds.index(kind) + 1 for kind in kinds)]))
    for name, value in list(vars(text).items()):
        if isinstance(value, list) and len(value) == layers:
            setattr(text, name, value[:kept])
    text.num_hidden_layers = kept
    text.vocab_size = min(text.vocab_size, VOCABULARY)
    for part in (config, text):
        if (getattr(part, "pad_token_id", None) or 0) >= text.vocab_size:
            part.pad_token_id = 0
    return config


def narrow(config: Any) -> Any:
    """The configuration with few heads of unchanged width, other widths in proportion, and few experts."""
    config = copy.deepcopy(config)
    text = config.get_text_config()
    width, heads = text.hidden_size, text.num_attention_heads
    shared = next((name for name in KEY_VALUE_HEADS if getattr(text, name, None)), None)
    groups = getattr(text, shared) if shared else heads
    kept_groups = min(groups, HEADS)
    kept = kept_groups * min(heads // groups, HEADS)
    for name, value in list(vars(text).items()):
        if name in AS_WIDE and value == width:
            setattr(text, name, width * kept // heads)
        elif name.endswith(INNER) and isinstance(value, int):
            setattr(text, name, min(value, INNER_STEP * math.ceil(value * kept / heads / INNER_STEP)))
        elif name in OF_EXPERTS and isinstance(value, int):
            setattr(text, name, min(value, max(EXPERTS, 2 * (getattr(text, "num_experts_per_tok", None) or 1))))
    if shared:
        setattr(text, shared, kept_groups)
    text.hidden_size, text.num_attention_heads = width * kept // heads, kept
    return config
