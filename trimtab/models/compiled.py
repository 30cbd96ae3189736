"""Layers whose element-wise work is compiled into few kernels: in training and scoring passes (--compile).

Every layer's forward pass is compiled once for all layers and all lengths of a row; attention is left out of it
(models/attention.py). Engines run the same layers uncompiled: a layer looks at the pass that it carries.

A compiler may break, give other numbers or begin anew with every length. So before the first step compiled layers are
tried against plain ones, on rows that are the same in every run: which kernels are made depends on the first sizes that
are met, and a resumed run must have those of the run before it. Nothing is chosen by measuring, for the same reason.
torch keeps what it has compiled between runs (TORCHINDUCTOR_CACHE_DIR, by default in the folder of temporary files).
"""

import contextlib
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

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
VARIANTS = 64  # of one function: models of a run differ in sizes, and each trains, scores and has adapters or not

FIRST, OTHER = (500, 524), (211, 130, 64)  # lengths of the sequences that are tried, in two rows
COMPARED = 4096  # numbers of every gradient
ROUNDING = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.1}
"""How far compiled passes may be from plain ones, as a share: in half precision the plain ones round in more places."""

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
    believed: bool = False,
) -> Trial:
    """Compile a model's layers and try them; where they will not do they are left plain.

    `scores`: in each of these it scores; `gradients`: it learns; `router`: and its routers with it; `believed`: the run
    that this one goes on from has compared them. All processes that hold a part of the model must ask.
    """
    began = time.monotonic()
    if root.path != "packed":
        return Trial("its rows are padded")
    with drawing_aside():
        problem = _problem(root, scores, gradients, router, believed)
    if problem:
        leave_plain(root)
    return Trial(problem, time.monotonic() - began)


def leave_plain(root: PackedModel) -> None:
    root.attention.compiled = False


def graphs_so_far() -> int:
    """How many pieces of code were compiled in this process."""
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"]


def _problem(
    root: PackedModel, scores: Sequence[AtWork], gradients: Gradients | None, router: bool, believed: bool
) -> str:
    """What is wrong with compiled layers; empty: nothing."""
    rows = [probing_batch(root.config, root.device, _within(root, lengths)) for lengths in (FIRST, OTHER)]
    works: list[tuple[Callable[[TokenBatch], list[Tensor]], bool]] = []  # and whether it is compared
    if gradients is not None:
        works.append((partial(_learnt, root, gradients, router), not believed and not has_dropout(root)))
    works += [(partial(_scored, root, at_work), not believed) for at_work in scores]
    leave_plain(root)
    plain = [[work(row) for row in rows] if compared else [] for work, compared in works]
    _install(root)
    root.attention.compiled = True
    for (work, _), expected in zip(works, plain):
        try:
            found = [work(rows[0])]
            graphs = graphs_so_far()
            found.append(work(rows[1]))
        except Exception as error:  # a compiler raises anything
            if gradients is not None:
                gradients()
            return f"the compiler fails ({' '.join(str(error).split())[:120]})"
        if graphs_so_far() > graphs:
            return "they are compiled anew for rows of another length"
        for ours, theirs in zip(found, expected):
            if (gap := _gap(ours, theirs)) > ROUNDING[next(root.parameters()).dtype]:
                return f"compiled ones are off by {gap:.2g} of what they give"
    return ""


def _install(root: PackedModel) -> None:
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, VARIANTS)
    for layer in layers_of(root.inner):
        if not isinstance(layer.forward, Either):
            layer.forward = Either(layer)


class Either:
    """A layer's forward pass: as it was compiled in passes that say so, else as it is."""

    def __init__(self, layer: nn.Module):
        self._layer, self._plain = [layer], layer.forward  # in a list: not a part of it
        self._compiled = torch.compile(layer.forward, dynamic=True, **COMPILER)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        current = carried(self._layer[0])
        is_compiled = isinstance(current, PackedPass) and current.compiled
        return (self._compiled if is_compiled else self._plain)(*arguments, **named)


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


def _gap(ours: list[Tensor], theirs: list[Tensor]) -> float:
    """The distance of the values, or of all gradients together, as a share of their size."""
    return max(_share(ours[:1], theirs[:1]), _share(ours[1:], theirs[1:]))


def _share(ours: list[Tensor], theirs: list[Tensor]) -> float:
    if not theirs:
        return 0.0
    a, b = torch.cat(ours), torch.cat(theirs)
    size = b.norm().item()
    return (a - b).norm().item() / size if size else 0.0
