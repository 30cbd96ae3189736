"""Kernels of a layer compiled all at once, before a pass would compile one after another what it comes to.

Triton compiles a kernel at its first launch, in half a second, and a layer has a dozen. Compiled kernels are kept on
disk; there this is a few launches.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from trimtab.rollout.builtin.cache import KVCache, KVShape
from trimtab.rollout.builtin.fused_layers import FusedLayers, heads_of, opened, summands


def compile_ahead(fused: FusedLayers, shape: KVShape, page: int, sizes: tuple[int, ...]) -> None:
    """For passes of so many rows that decode with such pages."""
    from trimtab.rollout.builtin.kernels.hardware import INTERPRETED

    if INTERPRETED:
        return
    work = [launch for rows in sizes for launch in _launches(fused, KVCache(shape, 1, page, fused.device), rows)]

    def done(launch: Callable[[], object]) -> None:
        if fused.device.index is not None:
            torch.accelerator.set_device_index(fused.device.index)  # a thread's own
        torch.zeros(1, device=fused.device)  # and it meets its device only at a launch of torch's
        # What fails here fails again in the pass itself, and is told there.
        with torch.no_grad(), contextlib.suppress(Exception):
            launch()

    with one_loads_at_a_time(), ThreadPoolExecutor(len(work)) as threads:
        list(threads.map(done, work))


@contextlib.contextmanager
def one_loads_at_a_time() -> Iterator[None]:
    """While threads compile. What launches a kernel is a Python module of its own, and Triton gives all of them one
    name: two threads that load theirs at once may each get the other's."""
    from triton.runtime import driver

    active, lock = driver.active, threading.Lock()
    load = getattr(active, "launcher_cls", None)
    if load is None:  # as other versions may have it
        yield
        return

    def loaded(*given: Any) -> Any:
        with lock:
            return load(*given)

    active.launcher_cls = loaded
    try:
        yield
    finally:
        active.launcher_cls = load


def _launches(fused: FusedLayers, cache: KVCache, rows: int) -> list[Callable[[], object]]:
    """What a layer launches, each on tensors of its own."""
    from trimtab.rollout.builtin.kernels.attention import paged_attention
    from trimtab.rollout.builtin.kernels.layers import add_norm

    layer, arguments = fused.backbone.layers[0], fused.arguments[0]
    attention, mlp, norm = layer.self_attn, layer.mlp, layer.input_layernorm
    like = fused.embedding_VD
    stream = like.new_zeros(rows, like.shape[1])
    mixed = like.new_zeros(rows, attention.o_proj.in_features)
    inside = like.new_zeros(rows, mlp.down_proj.in_features)
    zeros = torch.zeros(rows, dtype=torch.int64, device=like.device)
    keys, values, width = cache.keys[0], cache.values[0], cache.shape.key_width

    def normed(new: torch.Tensor | None) -> Callable[[], object]:
        return lambda: add_norm(new, stream.clone(), norm.weight, norm.variance_epsilon)

    def attended() -> object:
        query, scale = mixed.unflatten(1, (-1, width)), arguments.get("scaling") or width**-0.5
        others = {"softcap": arguments.get("softcap"), "window": arguments.get("sliding_window")}
        tables = torch.zeros(rows, 3, dtype=torch.int64, device=like.device)
        return paged_attention(query, keys, values, tables, zeros + 1, scale=scale, **others)

    return [
        normed(None),
        lambda: normed(summands(attention.o_proj, mixed))(),
        lambda: heads_of(attention, stream, fused.angles(zeros), keys, values, zeros),
        lambda: opened(mlp, stream),
        lambda: summands(mlp.down_proj, inside),
        attended,
    ]
