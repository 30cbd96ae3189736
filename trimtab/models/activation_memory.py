"""The memory of activations: gradient checkpointing, and activation offload to main memory.

A layer with gradient checkpointing saves its input and the results that --gradient_checkpointing_keep names. The
backward pass recomputes the rest:

    nothing    everything
    attention  all but the output of the attention kernel
    products   all but the outputs of the attention kernel and of matrix products: norms, rotations, activation
    functions

Gradients are equal bit for bit. Attention without a fused kernel (with a soft cap, for example) consists of matrix
products.

With --offload_activations, the tensors that autograd saves for the backward pass go to main memory: with gradient
checkpointing, the input of every layer. Weights and small tensors stay on the device. On an accelerator the copies use
a separate stream: out while the next layer runs, and back one layer ahead of the backward pass. On a CPU they are plain
copies, for tests.
"""

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from trimtab.config.training_options import BackwardOptions
from trimtab.distributed.fsdp import local
from trimtab.errors import UserError

if TYPE_CHECKING:
    from trimtab.models.packed import PackedModel

ATTENTION = (
    "_flash_attention_forward",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
)
SMALL = 2**20  # bytes; smaller tensors are not offloaded
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "_grouped_mm")


def enable_gradient_checkpointing(module: "PackedModel", options: BackwardOptions) -> None:
    """Enable gradient checkpointing as the options say."""
    if not options.gradient_checkpointing:
        return
    reentrant = options.gradient_checkpointing_use_reentrant
    arguments: dict[str, Any] = {"use_reentrant": reentrant}
    if options.gradient_checkpointing_keep != "nothing":
        kept = _operators(ATTENTION)
        if options.gradient_checkpointing_keep == "products":
            kept |= _operators(PRODUCTS)
        arguments["context_fn"] = partial(create_selective_checkpoint_contexts, partial(_policy, kept))
    module.inner.gradient_checkpointing_enable(gradient_checkpointing_kwargs=arguments)
    if reentrant:
        module.inner.enable_input_require_grads()  # a frozen embedding would cut the reentrant graph
    number = options.gradient_checkpointing_layers
    if isinstance(number, int):  # auto without a plan: all
        set_checkpointed_layers(module.inner, number)


def layers_of(model: nn.Module) -> list[nn.Module]:
    """The decoder layers of a Hugging Face model, sharded or not."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    return [part for part in model.modules() if isinstance(part, GradientCheckpointingLayer)]


def set_checkpointed_layers(model: nn.Module, number: int) -> None:
    """Restrict gradient checkpointing to this many layers, evenly spread."""
    layers = layers_of(model)
    if number > len(layers):
        name = type(model).__name__
        raise UserError(f"--gradient_checkpointing_layers {number}: {name} has {len(layers)} layers; ask for fewer")
    for place, layer in enumerate(layers):
        layer.gradient_checkpointing = (place + 1) * number // len(layers) > place * number // len(layers)


def _policy(kept: set[Any], _: Any, operator: Any, *arguments: Any, **named: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in kept else CheckpointPolicy.PREFER_RECOMPUTE


def _operators(names: tuple[str, ...]) -> set[Any]:
    return {getattr(torch.ops.aten, name).default for name in names if hasattr(torch.ops.aten, name)}


class ActivationOffload:
    """Moves activations to main memory in the forward pass, and back in the backward pass."""

    def __init__(self, module: nn.Module, small: int = SMALL):
        self._module, self._small = [module], small  # in a list, so that it is not registered as a submodule
        self._stream: Any = None

    @contextlib.contextmanager
    def instead(self) -> Iterator[None]:
        """Offload the tensors that autograd saves inside the context."""
        weights = {local(p).untyped_storage()._cdata for p in self._module[0].parameters()}
        newest: OffloadedTensor | None = None

        def keep(tensor: Tensor) -> "Tensor | OffloadedTensor":
            nonlocal newest
            if tensor.nbytes < self._small or tensor.untyped_storage()._cdata in weights:
                return tensor
            newest = self._send_away(tensor, newest)
            return newest

        def bring_back(kept: "Tensor | OffloadedTensor") -> Tensor:
            return kept if isinstance(kept, Tensor) else kept.back()

        with torch.autograd.graph.saved_tensors_hooks(keep, bring_back):
            yield

    def _send_away(self, tensor: Tensor, before: "OffloadedTensor | None") -> "OffloadedTensor":
        if self._stream is None and tensor.device.type != "cpu":
            self._stream = torch.Stream(device=tensor.device)
        return OffloadedTensor(tensor, None if tensor.device.type == "cpu" else self._stream, before)


class OffloadedTensor:
    def __init__(self, tensor: Tensor, stream: Any, before: "OffloadedTensor | None"):
        """`before`: the tensor offloaded before this one, which the backward pass needs after it."""
        self.device, self.stream, self.before = tensor.device, stream, before
        self._back: Tensor | None = None
        self._away = torch.empty_like(tensor, device="cpu", pin_memory=stream is not None, requires_grad=False)
        if stream is None:
            self._away.copy_(tensor)
            return
        stream.wait_stream(torch.accelerator.current_stream(self.device))
        with stream:
            self._away.copy_(tensor, non_blocking=True)
        tensor.record_stream(stream)  # its memory must not be reused before it is copied

    def send_back(self) -> None:
        """Start the copy back to the device on the stream."""
        if self._back is None:
            with self.stream or contextlib.nullcontext():
                self._back = torch.empty_like(self._away, device=self.device)
                self._back.copy_(self._away, non_blocking=True)

    def back(self) -> Tensor:
        """Wait for the tensor on its device, and start the copy of the one before it."""
        self.send_back()
        found, self._back = self._back, None  # the caller owns it now
        assert found is not None
        if self.stream is not None:
            here = torch.accelerator.current_stream(self.device)
            here.wait_stream(self.stream)
            found.record_stream(here)
        if self.before is not None:
            self.before.send_back()
        return found
