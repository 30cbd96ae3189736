"""The library between processes on stand-in devices, under the name of Ascend's.

Inside a world its collectives are device.cpp's. Alone it has what a link needs. Like Ascend's it takes tensors of its
own device only.
"""

from datetime import timedelta

import torch
import torch.distributed as dist


class Collectives(dist.ProcessGroupGloo):
    broadcasts = 0  # in this process

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta):
        options = dist.ProcessGroupGloo._Options()
        options._timeout = timeout
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        super().__init__(store, rank, size, options)

    def broadcast(self, tensor: torch.Tensor, root: int) -> dist.Work:
        assert tensor.device.type == "npu", f"hccl takes tensors of its device, and this one is on {tensor.device}"
        Collectives.broadcasts += 1
        return super().broadcast(torch.ops.standin.on_host(tensor), root)
