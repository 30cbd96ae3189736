"""Layers whose element-wise work is compiled into few kernels: in training and scoring passes (--compile).

Every layer's forward pass is compiled once for all layers and all lengths of a row; attention is left out of it
(models/attention.py). Engines run the same layers uncompiled: a layer looks at the pass that it carries.

A compiler may break, give other numbers or begin anew with every length. So before the first step compiled layers are
tried against plain ones, on rows that are the same in every run: which kernels are made depends on the first sizes that
are met, and a resumed run must have those of the run before it. Nothing is chosen by measuring, for the same reason.
torch keeps what it has compiled between runs (TORCHINDUCTOR_CACHE_DIR, by default in the folder of temporary files).
"""

import contextlib
import logging
import math
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from trimtab.data.batches import TokenBatch
from trimtab.distributed.device import has_kernels, kind_of
from trimtab.distributed.random_state import drawing_aside
from trimtab.distributed.sharding import local
from trimtab.errors import UserError
from trimtab.models.attention import PackedPass, carried
from trimtab.models.dropout import has_dropout
from trimtab.models.packed import PackedModel, learned_positions, scoring
from trimtab.models.recomputing import layers_of
from trimtab.models.reward import RewardOutput
from trimtab.models.selfcheck import probing_batch

COMPILER: dict[str, Any] = {"options": {"deterministic": True}}
"""Which compiler; tests take a faster one."""
LATE = 16
"""Pieces of code that may be compiled after the trials: a kind of pass that was not tried has about four."""
VARIANTS = 64  # of one function: models of a run differ in sizes, and each trains, scores and has adapters or not

FIRST, OTHER = (500, 524), (211, 130, 64)  # lengths of the sequences that are tried, in two rows
COMPARED = 4096  # numbers of every gradient
ROUNDING = {torch.float32: (1e-3, 1e-3), torch.bfloat16: (0.03, 0.1), torch.float16: (0.03, 0.1)}
"""How far values and gradients of compiled passes may be from those of plain ones, as a share of what they spread over:
in half precision the plain ones round in more places. Measured in bf16: 0.001 and 0.02."""

AtWork = Callable[[], AbstractContextManager[Any]]
"""Inside, a model is where and how it scores."""
Gradients = Callable[[], list[Tensor]]
"""What a backward pass gave, which is then forgotten."""


@dataclass(frozen=True)
class Trial:
    problem: str = ""  # why the layers are not compiled; empty: they are
    seconds: float = 0.0


def require_compiler(device: torch.device) -> None:
    """Refuse what asks for compiled layers where nothing compiles them."""
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
) -> Trial:
    """Compile a model's layers and try them; where they will not do they are left plain.

    `scores`: in each of these it scores; `gradients`: it learns; `router`: and its routers with it. All processes that
    hold a part of the model must ask.
    """
    began = time.monotonic()
    if root.path != "packed":
        return Trial("its rows are padded")
    with drawing_aside(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about what is left uncompiled
        problem = _problem(root, scores, gradients, router)
    if problem:
        leave_plain(root)
    Either.tried = graphs_so_far()
    return Trial(problem, time.monotonic() - began)


def leave_plain(root: PackedModel) -> None:
    root.attention.compiled = False


def later_problem(root: PackedModel) -> str:
    """What was wrong with a model's compiled layers after they were tried; empty: nothing."""
    if not root.attention.compiled:
        return ""
    late = graphs_so_far() - Either.tried
    return root.attention.failure or (f"they were compiled anew {late} times" if late > LATE else "")


def graphs_so_far() -> int:
    """How many pieces of code were compiled in this process."""
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"]


def _problem(root: PackedModel, scores: Sequence[AtWork], gradients: Gradients | None, router: bool) -> str:
    """What is wrong with compiled layers; empty: nothing."""
    rows = [probing_batch(root.config, root.device, _within(root, lengths)) for lengths in (FIRST, OTHER)]
    works: list[tuple[Callable[[TokenBatch], list[Tensor]], bool]] = []  # and whether it is compared
    if gradients is not None:
        works.append((partial(_learnt, root, gradients, router), not has_dropout(root)))
    works += [(partial(_scored, root, at_work), True) for at_work in scores]
    leave_plain(root)
    try:
        plain = [[work(row) for row in rows] for work, compared in works if compared]
        _install(root)
        root.attention.compiled = True
        for work, compared in works:
            found = [work(rows[0])]
            graphs = graphs_so_far()
            found.append(work(rows[1]))
            if root.attention.failure:
                return root.attention.failure
            if graphs_so_far() > graphs:
                return "they are compiled anew for rows of another length"
            for ours, theirs in zip(found, plain.pop(0) if compared else ()):
                if problem := _difference(ours, theirs, ROUNDING[next(root.parameters()).dtype]):
                    return problem
    except Exception as error:  # a compiler raises anything
        if gradients is not None:
            gradients()
        return _told(error)
    return ""


def _install(root: PackedModel) -> None:
    if hasattr(torch._dynamo.config, "nested_graph_breaks"):  # two pieces a layer, before and after attention, not four
        torch._dynamo.config.nested_graph_breaks = True
    logging.getLogger("torch._dynamo").setLevel(logging.ERROR)  # pages about what it leaves uncompiled
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, VARIANTS)
    for layer in layers_of(root.inner):
        if not isinstance(layer.forward, Either):
            layer.forward = Either(layer)


class Either:
    """A layer's forward pass: as it was compiled in passes that say so, else as it is."""

    tried: ClassVar[int] = 0  # pieces of code that were compiled up to the last trial

    def __init__(self, layer: nn.Module):
        self._layer, self._plain = [layer], layer.forward  # in a list: not a part of it
        self._compiled = torch.compile(layer.forward, dynamic=True, **COMPILER)
        self._fails = False

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        current = carried(self._layer[0])
        if self._fails or not (isinstance(current, PackedPass) and current.compiled):
            return self._plain(*arguments, **named)
        try:
            return self._compiled(*arguments, **named)
        except torch._dynamo.exc.TorchDynamoException as error:
            # Raised before anything has run, so that this pass can go on. The others follow after the step.
            self._fails, current.failure = True, _told(error)
            return self._plain(*arguments, **named)


def _told(error: Exception) -> str:
    return f"the compiler fails ({' '.join(str(error).split())[:120]})"


# ---- what is compared


def _scored(root: PackedModel, at_work: AtWork, row: TokenBatch) -> list[Tensor]:
    with at_work(), scoring(root):
        return [root.check_values(row).float()]


def _learnt(root: PackedModel, gradients: Gradients, router: bool, row: TokenBatch) -> list[Tensor]:
    """Values and the beginning of every gradient."""
    if router:
        out = root(row, router=True)
        values = out.scores_S if isinstance(out, RewardOutput) else out.log_probs_N
        values = torch.cat([values, *(logits.float().logsumexp(-1) for logits in out.router_logits)])
    else:
        values = root.check_values(row)
    # Each weighs something else, or what they share would cancel out.
    weights = torch.linspace(-1, 2, len(values), device=values.device)
    (values * weights).mean().backward()
    found = [local(gradient).flatten()[:COMPARED].float() for gradient in gradients()]
    return [values.detach().float(), *found]


def _within(root: PackedModel, lengths: tuple[int, ...]) -> list[int]:
    room = learned_positions(root.inner)
    return [length if room is None else min(length, room) for length in lengths]


def _difference(ours: list[Tensor], theirs: list[Tensor], most: tuple[float, float]) -> str:
    """What is too far off, of values and of all gradients together; empty: nothing."""
    if [tensor.shape for tensor in ours] != [tensor.shape for tensor in theirs]:
        return "compiled ones give other gradients"
    gaps = _share(ours[:1], theirs[:1]), _share(ours[1:], theirs[1:])
    for what, gap, allowed in zip(("values", "gradients"), gaps, most):
        if not gap <= allowed:  # also one that is no number
            return f"{what} of compiled ones are off by {gap:.2g} of their spread"
    return ""


def _share(ours: list[Tensor], theirs: list[Tensor]) -> float:
    """How far apart they are, against how far theirs are from their mean: all log-probs are about -log V. Two values
    may be alike by chance."""
    if not theirs:
        return 0.0
    a, b = torch.cat(ours), torch.cat(theirs)
    gap, spread = (a - b).norm().item(), max((b - b.mean()).norm().item(), 0.1 * b.norm().item())
    return gap / spread if spread else (0.0 if gap == 0 else math.inf)
