"""torch.compile for decoder layers, which fuses their element-wise work, in training and scoring (--compile).

The forward pass of a layer is compiled once for all layers and all row lengths; attention is not compiled
(models/attention.py). Engines run the same layers uncompiled: a layer checks the pass that it carries.

A compiler may fail, give other numbers or recompile for every length. So before the first step, compiled layers are
compared with eager ones on rows that are the same in every run: the generated kernels depend on the first sizes seen,
and a resumed run must get the same kernels. For the same reason, nothing is chosen by measuring time. torch caches
compiled code between runs (TORCHINDUCTOR_CACHE_DIR, by default in the temporary folder).

Layers are compared one by one on the same input. Over a whole model in half precision, rounding accumulates: with 32
random layers, gradients may differ by a tenth without any error. In one layer rounding is so small that an error stands
out. A token routed to another expert because of the last bit of its router is no error either, so the worst tenth of
the tokens is ignored.
"""

import contextlib
import logging
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from trimtab.data.batches import TokenBatch
from trimtab.distributed.device import has_kernels, is_hopper, kind_of
from trimtab.distributed.fsdp import local
from trimtab.distributed.random_state import preserve_rng_state
from trimtab.errors import UserError
from trimtab.interrupts import unheard_by_children
from trimtab.models.activation_memory import layers_of
from trimtab.models.attention import PackedPass, carried
from trimtab.models.fused_layer import FusedLayer, FusedNorm, is_llama_like, lora_linear, modules_of_layers
from trimtab.models.packed import PackedModel, backbone_of, has_dropout, learned_positions, scoring
from trimtab.models.precompile import compile_together
from trimtab.models.reward import RewardOutput
from trimtab.models.routing import recorded_routes, replayed_routes
from trimtab.models.selfcheck import probe_batch

COMPILER: dict[str, Any] = {"options": {"deterministic": True}}
"""Arguments of torch.compile; tests use a faster compiler."""
LATE = 16
"""Graphs that may be compiled after the trial passes; a kind of pass that was not tried has about four."""
VARIANTS = 64  # of one function: a run's models differ in size, train or score, with or without adapters

FIRST, OTHER = (500, 524), (211, 130, 64)  # sequence lengths of the two trial rows

ADDED = {torch.float32: 1e-3, torch.bfloat16: 0.03, torch.float16: 0.03}
"""Tolerance of a token's output, relative to the change by the layer; rounding of the output comes on top."""
WEIGHTS = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.1}
"""Tolerance of the gradient of a layer's weights, relative to its norm."""
COUNTED = 0.9  # quantile of the tokens that must be within the tolerance

Forward = Callable[..., Any]
AtWork = Callable[[], AbstractContextManager[Any]]
"""A context in which a model scores, on the right device and with adapters on or off."""
Gradients = Callable[[], list[Tensor]]
"""Returns the gradients of a backward pass and clears them."""


@dataclass(frozen=True)
class CompileResult:
    problem: str = ""  # why the layers are not compiled; empty: they are
    seconds: float = 0.0


def require_compiler(device: torch.device) -> None:
    """Refuse --compile on without a compiler for the device."""
    if device.type == "cpu":
        from torch._inductor.cpp_builder import get_cpp_compiler
        from torch._inductor.exc import InvalidCxxCompiler

        try:
            get_cpp_compiler()
        except InvalidCxxCompiler:
            raise UserError(
                "--compile on: no C++ compiler is here, which compiles for a CPU; install g++, or leave it out"
            ) from None
    elif not has_kernels(device):
        raise UserError(f"--compile on: layers cannot be compiled for {kind_of(device).name} here; leave it out")


def compile_layers(
    root: PackedModel,
    *,
    scores: Sequence[AtWork] = (contextlib.nullcontext,),
    gradients: Gradients | None = None,
    router: bool = False,
) -> CompileResult:
    """Compile a model's layers and check them; if they fail, the eager layers stay in use.

    `scores`: contexts in which it scores; `gradients`: given for a trained model; `router`: its routers are trained
    too.
    All processes of the model must call it.
    """
    began = time.monotonic()
    if root.path != "packed":
        return CompileResult("its rows are padded")
    with preserve_rng_state(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about code that is not compiled
        problem = _problem(root, scores, gradients, router)
    if problem:
        disable_compile(root)
    CompiledLayer.tried = graphs_so_far()
    return CompileResult(problem, time.monotonic() - began)


def fuse_layers(root: PackedModel, device: torch.device, *, bf16: bool) -> str:
    """Run the layers of a Llama-like model by the kernels that the built-in engine uses (fused_layer.py). `bf16`: the
    dtype of its weights, when layers of a sharded model are gathered. Returns why not; empty: they do. All processes
    of the model must call it."""
    backbone = backbone_of(root.inner)
    if not is_hopper(device) or not bf16:
        return "it needs bf16, Triton and compute capability 9.0 (H100, H200)"
    if root.path != "packed" or not is_llama_like(backbone):
        return f"{type(root.inner).__name__} has other layers than Llama"
    layers = [lora_linear(module) for module in modules_of_layers(backbone)]
    adapted = sum(hasattr(module, "lora_A") for module in root.modules())
    if None in layers:
        return "4-bit weights and some kinds of adapters are not supported"
    if any(layer.rank % 8 for layer in layers if layer) or adapted > sum(layer.rank > 0 for layer in layers if layer):
        return "adapters need a rank that is a multiple of 8, and only layers may have one"
    if has_dropout(root):
        return "dropout is not supported"
    try:
        for layer in backbone.layers:
            layer.forward = CompiledLayer(layer, FusedLayer(layer))
        backbone.norm.forward = FusedNorm(backbone.norm)
        root.attention.compiled = root.attention.fused = True
        problem = _fused_problem(root)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # a kernel compiler may fail in many ways
        problem = f"a kernel fails ({' '.join(str(error).split())[:120]})"
    if problem:
        unfuse_layers(root)
    return problem


def unfuse_layers(root: PackedModel) -> None:
    backbone = backbone_of(root.inner)
    root.attention.compiled = root.attention.fused = False
    for layer in (*backbone.layers, backbone.norm):
        vars(layer).pop("forward", None)


def _fused_problem(root: PackedModel) -> str:
    learns = any(weight.requires_grad for weight in root.parameters())
    ways = [Comparison(learns) for learns in ([True, False] if learns else [False])]
    with preserve_rng_state(), scoring(root):
        batch = probe_batch(root.config, root.device, FIRST)

        def check(comparison: "Comparison | FirstLayer") -> None:
            root.attention.comparison = comparison
            try:
                root.check_values(batch)
            finally:
                root.attention.comparison = None

        compile_together(lambda: check(FirstLayer(ways)), root.device)
        for comparison in ways:
            check(comparison)
            if comparison.problem:
                return comparison.problem
    return ""


def disable_compile(root: PackedModel) -> None:
    root.attention.compiled = root.attention.fused


def compile_problem(root: PackedModel) -> str:
    """The problem of a model's compiled layers since they were checked; empty: none."""
    if not root.attention.compiled or root.attention.fused:
        return ""
    late = graphs_so_far() - CompiledLayer.tried
    return root.attention.failure or (f"they were compiled anew {late} times" if late > LATE else "")


def graphs_so_far() -> int:
    """Number of graphs compiled in this process."""
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"]


def _problem(root: PackedModel, scores: Sequence[AtWork], gradients: Gradients | None, router: bool) -> str:
    """Run trial passes and compare; returns the first problem, or an empty string."""
    room = learned_positions(root.inner)
    rows = [
        probe_batch(root.config, root.device, [n if room is None else min(n, room) for n in lengths])
        for lengths in (FIRST, OTHER)
    ]

    @contextlib.contextmanager
    def scored(at_work: AtWork) -> Iterator[None]:
        with at_work(), scoring(root):
            yield

    def run(row: TokenBatch, at_work: AtWork | None) -> None:
        if at_work is not None:
            with scored(at_work):
                root.check_values(row)
            return
        assert gradients is not None
        _learnt_values(root, row, router).mean().backward()
        gradients()

    works: list[AtWork | None] = [*([] if gradients is None else [None]), *scores]  # None: training
    try:
        _install(root)
        if has_kernels(root.device):
            # Start the compile workers, shielded from signals: a signal to the run's process group would kill them
            # while the run still saves, and torch would wait forever for their results.
            from torch._inductor.async_compile import AsyncCompile

            with unheard_by_children():
                AsyncCompile.warm_pool()
        root.attention.compiled = True
        for at_work in works:
            run(rows[0], at_work)
            graphs = graphs_so_far()
            run(rows[1], at_work)
            if root.attention.failure:
                return root.attention.failure
            if graphs_so_far() > graphs:
                return "they are compiled anew for rows of another length"
            learns = at_work is None
            if learns and has_dropout(root):
                continue
            comparison = root.attention.comparison = Comparison(learns)
            try:
                with torch.no_grad() if at_work is None else scored(at_work):
                    root.check_values(rows[0])
            finally:
                root.attention.comparison = None
            if comparison.problem:
                return comparison.problem
    except Exception as error:  # a compiler may raise anything
        if gradients is not None:
            gradients()
        return _compiler_error(error)
    return ""


def _learnt_values(root: PackedModel, row: TokenBatch, router: bool) -> Tensor:
    if not router:
        return root.check_values(row)
    out = root(row, router=True)
    values = out.scores_S if isinstance(out, RewardOutput) else out.log_probs_N
    return torch.cat([values, *(logits.float().logsumexp(-1) for logits in out.router_logits)])


def _install(root: PackedModel) -> None:
    if hasattr(torch._dynamo.config, "nested_graph_breaks"):  # two graphs a layer instead of four
        torch._dynamo.config.nested_graph_breaks = True
    logging.getLogger("torch._dynamo").setLevel(logging.ERROR)  # long messages about uncompiled code
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, VARIANTS)
    # Treat a layer's float attributes (scales, probabilities) as constants. As symbols, most of them cause torch to
    # restart tracing, in every run, because no cache covers that.
    torch._dynamo.config.specialize_float = True
    for layer in layers_of(root.inner):
        if not isinstance(layer.forward, CompiledLayer):
            layer.forward = CompiledLayer(layer)


class CompiledLayer:
    """A layer's forward: compiled in passes with `compiled` set, otherwise eager."""

    tried: ClassVar[int] = 0  # graphs compiled up to the last check

    def __init__(self, layer: nn.Module, instead: Forward | None = None):
        """`instead`: used in the place of the compiled layer."""
        self._layer, self._plain = [layer], layer.forward  # in a list, so that it is not registered as a submodule
        self._compiled = instead or torch.compile(layer.forward, dynamic=True, **COMPILER)
        self._fails = False

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        current = carried(self._layer[0])
        if self._fails or not (isinstance(current, PackedPass) and current.compiled):
            return self._plain(*arguments, **named)
        if current.comparison is not None:
            return current.comparison.of(self._layer[0], self._plain, self._compiled, arguments, named)
        if torch.is_grad_enabled():
            arguments = (self._learning(arguments[0]), *arguments[1:])
        try:
            return self._compiled(*arguments, **named)
        except torch._dynamo.exc.TorchDynamoException as error:
            # Raised before anything has run, so this pass can continue eagerly. Other layers follow after the step.
            self._fails, current.failure = True, _compiler_error(error)
            return self._plain(*arguments, **named)

    def _learning(self, hidden_TD: Tensor) -> Tensor:
        """Make the input of the first trained layer above frozen embeddings require a gradient, like that of all
        others; it would be compiled separately otherwise."""
        if hidden_TD.requires_grad or not any(weight.requires_grad for weight in self._layer[0].parameters()):
            return hidden_TD
        return RequireGradient.apply(hidden_TD, hidden_TD.new_empty((), requires_grad=True))


class RequireGradient(torch.autograd.Function):
    """Makes hidden states require a gradient, and discards it."""

    @staticmethod
    def forward(ctx, hidden_TD, asks):
        return hidden_TD.clone()  # a view would also be compiled separately

    @staticmethod
    def backward(ctx, grad):
        return None, None


def _compiler_error(error: Exception) -> str:
    return f"the compiler fails ({' '.join(str(error).split())[:120]})"


# ---- comparison of a compiled and an eager layer


@dataclass
class Comparison:
    """Compares all compiled layers with eager ones, during one forward pass of the model without gradients."""

    learns: bool
    problem: str = ""  # of the first layer with one

    def of(self, layer: nn.Module, plain: Forward, compiled: Forward, arguments: Sequence[Any], named: Any) -> Any:
        """Compare a layer, and return the eager result."""
        hidden_TD, *others = arguments
        if not self.problem:
            slope_TD = arbitrary_gradient(hidden_TD)
            with recorded_routes(layer) as routes:
                theirs = self.run(layer, plain, slope_TD, arguments, named)
            with replayed_routes(routes):
                ours = self.run(layer, compiled, slope_TD, arguments, named)
            self.problem = _difference(ours, theirs, hidden_TD, slope_TD)
        return plain(hidden_TD, *others, **named)

    def run(
        self, layer: nn.Module, call: Forward, slope_TD: Tensor, arguments: Sequence[Any], named: Any
    ) -> "LayerResult":
        hidden_TD, *others = arguments
        with torch.set_grad_enabled(self.learns):
            start = hidden_TD.detach().requires_grad_(self.learns)
            out = call(start, *others, **named)
            out = out[0] if isinstance(out, tuple) else out
            if not out.requires_grad:
                return out, None, []
            weights = [weight for weight in layer.parameters() if weight.requires_grad]
            back, *found = torch.autograd.grad(out, [start, *weights], slope_TD, allow_unused=True)
        return out.detach(), back, [local(gradient) for gradient in found if gradient is not None]


@dataclass
class FirstLayer:
    """In the place of a comparison, for a pass whose launches are only noted: the first layer is run in every way, the
    others, which need the same kernels, not at all."""

    ways: list[Comparison]

    def of(self, layer: nn.Module, plain: Forward, compiled: Forward, arguments: Sequence[Any], named: Any) -> Any:
        for way in self.ways:
            way.run(layer, compiled, arbitrary_gradient(arguments[0]), arguments, named)
        self.ways = []
        return arguments[0]


def arbitrary_gradient(hidden_TD: Tensor) -> Tensor:
    slope_TD = torch.arange(hidden_TD.numel(), device=hidden_TD.device).mul(0.7).sin().view_as(hidden_TD)
    return slope_TD.to(hidden_TD.dtype)


LayerResult = tuple[Tensor, Tensor | None, list[Tensor]]
"""Hidden states of a layer and, in training, the gradients of its input and of its weights."""


def _difference(ours: LayerResult, theirs: LayerResult, hidden_TD: Tensor, slope_TD: Tensor) -> str:
    """Describe a difference above the tolerance; empty: none."""
    (out_TD, back_TD, weights), (plain_TD, plain_back_TD, plain_weights) = ours, theirs
    if (back_TD is None) != (plain_back_TD is None) or len(weights) != len(plain_weights):
        return "compiled ones give other gradients"
    off = {"values": off_by(out_TD, plain_TD, hidden_TD).quantile(COUNTED).item()}
    if back_TD is not None and plain_back_TD is not None:
        off["gradients"] = off_by(back_TD, plain_back_TD, slope_TD).quantile(COUNTED).item()
    if plain_weights:
        a, b = (torch.cat([w.flatten().float() for w in found]) for found in (weights, plain_weights))
        off["gradients of weights"] = ((a - b).norm() / (WEIGHTS[hidden_TD.dtype] * b.norm()).clamp_min(1e-30)).item()
    for what, times in off.items():
        if not times <= 1:  # also true for NaN
            return f"{what} of compiled ones are off by {times:.2g} times what rounding explains"
    return ""


def off_by(ours_TD: Tensor, theirs_TD: Tensor, before_TD: Tensor) -> Tensor:
    """The error of each token [T] after a layer, as a multiple of the tolerance. `before_TD`: the layer's input."""
    ours, theirs, before = (x.float().flatten(0, -2) for x in (ours_TD, theirs_TD, before_TD))
    rounded_T = torch.finfo(theirs_TD.dtype).eps * theirs.norm(dim=1)
    allowed_T = ADDED[theirs_TD.dtype] * (theirs - before).norm(dim=1) + rounded_T
    return (ours - theirs).norm(dim=1) / allowed_T.clamp_min(1e-30)
