"""Split a model over the processes of a mesh with PyTorch's FSDP2. A mesh of one gets no wrapper.

    --zero_stage 0    every process keeps everything (but for those that share a row); gradients are summed
    --zero_stage 1, 2 gradients and optimiser are split; parameters stay gathered after a forward pass
    --zero_stage 3    parameters too are gathered only while a layer works; with --zpg few neighbours keep them
                      between them from its forward to its backward pass (neighbours.py)

The split parameters are the fp32 masters; with --bf16 the gathered ones are their bf16 working copies, and gradients
are summed in fp32 (or in --grad_accum_dtype). With --adam_offload the masters and Adam's moments live in main memory.
"""

import contextlib
import itertools
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from trimtab.distributed.blocks import blocks_of, in_stripes
from trimtab.distributed.memory import release_main_memory
from trimtab.distributed.mesh import Mesh
from trimtab.distributed.neighbours import keep_among
from trimtab.distributed.watch import pulse

LARGE = 2**23  # bytes of a layer from which on it matters that the allocator keeps what was freed
WHOLE_SUMS = 2**32  # bytes of gradient sums that every process may hold whole between the passes of a step
GRADIENT_DTYPES = {None: torch.float32, "fp32": torch.float32, "bf16": torch.bfloat16}


def accumulate_in(dtype: torch.dtype, parameter: Tensor, sums: dict[str, Tensor], name: str) -> None:
    """Add a parameter's gradients up in another dtype than its own, in `sums`: each as the backward pass completes it,
    so that no pass holds all of them in two dtypes."""

    def accumulate(parameter: Tensor) -> None:
        assert parameter.grad is not None
        gradient = parameter.grad.to(dtype)
        parameter.grad = None
        if name in sums:
            sums[name] += gradient
        else:
            sums[name] = gradient

    parameter.register_post_accumulate_grad_hook(accumulate)


def shard(
    module: nn.Module,
    layers: list[nn.Module],
    mesh: Mesh,
    *,
    zero_stage: int,
    dtype: torch.dtype | None = None,
    gradient_dtype: torch.dtype | None = None,
    offload: bool = False,
    copies: bool = True,
    kept: DeviceMesh | None = None,
    prefetch: bool = False,
) -> None:
    """Split `module`, the root whose forward is called, and its `layers`, which are gathered one at a time.

    `dtype`: of the gathered parameters; None leaves them as they are. `copies=False`: split over all processes, also
    where the mesh has copies of the trained model. `kept`: over what else weights are split from a forward pass to its
    backward pass (Mesh.for_keeping). `prefetch`: gather a layer while the one before it works.
    """
    if mesh.size == 1:
        return
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    arguments: dict[str, Any] = {
        "mesh": mesh.for_sharding(copies=copies),
        "reshard_after_forward": zero_stage == 3,
        "mp_policy": MixedPrecisionPolicy(dtype, gradient_dtype, cast_forward_inputs=False),
    }
    if offload:
        arguments["offload_policy"] = CPUOffloadPolicy(pin_memory=mesh.device.type != "cpu")
    in_main_memory = zero_stage == 3 and mesh.device.type == "cpu"
    for layer in layers:
        large = sum(p.numel() * p.element_size() for p in layer.parameters()) >= LARGE
        fully_shard(layer, **arguments)
        if in_main_memory and large:
            layer.register_forward_hook(_give_back)  # after FSDP's own, which has let go of the layer
    fully_shard(module, **arguments)
    if zero_stage == 3 and kept is not None:
        for part in (*layers, module):
            keep_among(part, kept)
    if zero_stage == 3 and prefetch:
        _prefetch([module, *layers])


def _prefetch(in_order: list[Any]) -> None:
    """Ask for the next one before the work of one begins, on the way there and back."""
    for earlier, later in itertools.pairwise(in_order):
        earlier.set_modules_to_forward_prefetch([later])
        later.set_modules_to_backward_prefetch([earlier])


def _give_back(*_: Any) -> None:
    release_main_memory()


def sync_gradients(module: nn.Module, last: bool) -> None:
    """Sum gradients over processes in the coming backward pass: in the last one of a step, before that only where sums
    are too large to be kept whole."""
    pulse.move()
    if hasattr(module, "set_requires_gradient_sync"):
        module.set_requires_gradient_sync(last or not keeps_whole_sums(learnt(module)))


def keeps_whole_sums(learnt: int) -> bool:
    """Whether gradients of so many parameters are added up in every process, and over processes once a step. A rule of
    the size alone: all processes must follow the same."""
    return 4 * learnt <= WHOLE_SUMS


def learnt(module: nn.Module) -> int:
    """Trained parameters, of a split model those of all processes."""
    return sum(p.numel() for p in module.parameters() if p.requires_grad)


def split_again(module: nn.Module) -> None:
    """Let go of what a forward pass outside training left gathered."""
    for part in module.modules():
        if hasattr(part, "reshard"):
            part.reshard()


@contextlib.contextmanager
def gathered(module: nn.Module) -> Iterator[None]:
    """All of the model in every process, to run without gradients. Every process must enter.

    FSDP's own hooks are away meanwhile, so that processes may run different numbers of passes: a pass would be counted,
    and whoever counted more would gather in another order in its next backward pass.
    """
    parts = [part for part in module.modules() if hasattr(part, "unshard")]
    split_again(module)  # what is gathered already may be older than the last step
    for part in parts:
        part.unshard()
    hooks = [(part, part._forward_pre_hooks, part._forward_hooks) for part in parts]
    for part in parts:
        part._forward_pre_hooks, part._forward_hooks = OrderedDict(), OrderedDict()
    try:
        yield
    finally:
        for part, before, after in hooks:
            part._forward_pre_hooks, part._forward_hooks = before, after
        split_again(module)


def local(tensor: Tensor) -> Tensor:
    """This process's part of a tensor: all of it, where it is not split."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """The tensor itself, gathered from its parts. Every process must ask."""
    if not isinstance(tensor, DTensor):
        return tensor
    return _from_stripes(tensor) if in_stripes(tensor) else tensor.full_tensor()


def _from_stripes(tensor: DTensor) -> Tensor:
    """Torch 2.11 cannot gather what was cut in stripes by hand."""
    gathered = torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.to_local().device)
    for block in blocks_of(tensor):
        gathered[block.slices] = tensor.to_local()[block.held]
    return sum_over_parts(gathered, tensor)


def keep_part(whole: Tensor, tensor: Tensor) -> None:
    """Fill this process's part of `tensor` from what it is to be."""
    for block in blocks_of(tensor):
        local(tensor)[block.held].copy_(whole[block.slices])


def sum_over_parts(value: Tensor, tensor: Tensor) -> Tensor:
    """Add a figure of every part of `tensor` (a DTensor's, or the whole tensor's) together."""
    if not isinstance(tensor, DTensor):
        return value
    for dimension, placement in enumerate(tensor.placements):
        assert not placement.is_partial(), "parts that are still to be added up"
        if not placement.is_replicate():
            value = value.clone()
            torch.distributed.all_reduce(value, group=tensor.device_mesh.get_group(dimension))
    return value
