"""A world of one for a library that insists on torch's default group: it would else open a port on every interface."""

import torch.distributed as dist


def be_alone() -> None:
    """Join a group of this process alone, which nobody can reach; nothing, if there is a group already."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
