"""Collectives between processes on stand-in devices: gloo's, on the same bytes as CPU tensors.

Like Ascend's library it takes its own device's tensors only, and none in double precision.
"""

from datetime import timedelta

import torch
import torch.distributed as dist


class Collectives(dist.ProcessGroup):
    calls = 0  # in this process

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta):
        super().__init__(rank, size)
        options = dist.ProcessGroupGloo._Options()
        options._timeout = timeout
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        self._gloo = dist.ProcessGroupGloo(store, rank, size, options)

    def getBackendName(self) -> str:
        return "hccl"

    def size(self) -> int:
        return self._gloo.size()

    def rank(self) -> int:
        return self._gloo.rank()

    def shutdown(self) -> None:
        self._gloo.shutdown()

    def _set_group_name(self, name: str) -> None:
        self._named = name

    @property
    def group_name(self) -> str:
        return self._named

    def allreduce(self, tensors, options=None):
        options = options or dist.AllreduceOptions()
        return _Work(self._gloo.allreduce([_host(t) for t in tensors], options), tensors)

    def broadcast(self, tensors, options=None, *rest):
        if isinstance(tensors, torch.Tensor):  # a link calls it so
            root, tensors = options, [tensors]
            options = dist.BroadcastOptions()
            options.rootRank = root
        return _Work(self._gloo.broadcast([_host(t) for t in tensors], options), tensors)

    def allgather(self, outputs, tensors, options=None):
        hosts = [[_host(t) for t in each] for each in outputs]
        options = options or dist.AllgatherOptions()
        return _Work(self._gloo.allgather(hosts, [_host(t) for t in tensors], options), outputs)

    def _allgather_base(self, output, tensor, options=None):
        options = options or dist.AllgatherOptions()
        return _Work(self._gloo._allgather_base(_host(output), _host(tensor), options), output)

    def _reduce_scatter_base(self, output, tensor, options=None):
        options = options or dist.ReduceScatterOptions()
        return _Work(self._gloo._reduce_scatter_base(_host(output), _host(tensor), options), output)

    def barrier(self, options=None):
        return _Work(self._gloo.barrier(dist.BarrierOptions()), None)


class _Work(dist._Work):
    def __init__(self, work, result):
        super().__init__()
        self._work, self._result = work, result

    def wait(self, timeout=None):
        return self._work.wait()

    def is_completed(self):
        return self._work.is_completed()

    def get_future(self):
        self._work.wait()
        future = torch.futures.Future()
        future.set_result(self._result)
        return future


def _host(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.device.type != "npu":
        raise RuntimeError(f"hccl takes tensors of its device, and this one is on {tensor.device}")
    if tensor.dtype == torch.float64:
        raise RuntimeError("hccl does not take double precision")
    Collectives.calls += 1
    return torch.ops.standin.on_host(tensor)
