"""Work of a device that is captured once and replayed."""

from collections.abc import Callable
from typing import TypeAlias

import torch

Graph: TypeAlias = torch.cuda.CUDAGraph


def capture(work: Callable[[], None], pool: tuple[int, int] | None) -> Graph:
    """What `work` asks of the device, to be replayed: on the same tensors, whatever they hold then. Runs it once.

    `pool`: another graph's pool(), to share what lies between; then they must be replayed one after another.
    """
    here, aside = torch.cuda.current_stream(), torch.cuda.Stream()
    aside.wait_stream(here)
    with torch.cuda.stream(aside):
        work()
    here.wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):  # other threads may use the device
        work()
    return graph
