"""Weights that few neighbours keep between them while a layer waits for its backward pass (--zpg, ZeRO++'s second
partition): gathering them again needs no other process.

FSDP2 can do that (`reshard_after_forward=2`), but makes groups of processes for every layer, and asks every process of
the world to take part. Ours are made once, with the mesh. So what FSDP2 would have noted is noted here, in fields of it
that have no public name.
"""

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh


def keep_among(part: nn.Module, kept: DeviceMesh) -> None:
    """`part`: already split, and not yet run. `kept`: neighbours in its last dimension."""
    from torch.distributed.fsdp._fully_shard._fsdp_common import HSDPMeshInfo

    where = HSDPMeshInfo(kept, shard_mesh_dim=1, replicate_mesh_dim=0)
    for group in _parameter_groups(part):
        group.post_forward_mesh_info = where
        for parameter in group.fsdp_params:
            parameter.post_forward_mesh_info = where
            whole = torch.empty(parameter._orig_size, device="meta")
            parameter._init_sharded_post_forward_param_metadata(whole)


def _parameter_groups(part: Any) -> list[Any]:
    state = part._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [state._fsdp_param_group] if state._fsdp_param_group else []  # before torch 2.13
