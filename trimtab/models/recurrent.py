"""Recurrent layers in packed rows: Mamba, gated delta rules, short convolutions and whatever else keeps a state.

transformers' modules of this kind take a cache with the states of a batch, and otherwise begin at 0. They know no
packed rows, so here each sequence is a row of a block of similar lengths, padded on the right: what comes later changes
nothing before it. In the engine a sequence keeps its state between passes (rollout/builtin/state_cache.py).

A module is recognised by its code: its forward updates a convolution's or a recurrent state. In the engine its steps of
one token, and whole prompts of Gated DeltaNet, run on kernels where the device has them (recurrent_kernels.py).
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from trimtab.distributed.device import has_kernels
from trimtab.models.attention import carried

UPDATES = {"update_conv_state", "update_recurrent_state"}
CACHES = ("cache_params", "past_key_values")  # names of the argument, by family
Run = Callable[[Tensor, Any], Tensor]
"""Hidden states of a batch [S, L, D] and a cache, or None; returns the module's output."""


def recurrent_modules(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if _keeps_a_state(module)]


def _keeps_a_state(module: nn.Module) -> bool:
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return code is not None and hasattr(module, "layer_idx") and bool(UPDATES & set(code.co_names))


def install(model: nn.Module) -> None:
    """Let the model's recurrent modules mix tokens as the current pass says."""
    for module in recurrent_modules(model):
        if not isinstance(vars(module).get("forward"), RecurrentForward):
            module.forward = RecurrentForward(module)


class RecurrentForward:
    """The forward of a recurrent module: each sequence of a packed row alone; plain outside of packed passes."""

    def __init__(self, module: nn.Module):
        self._module = [module]  # in a list, so that it is not registered as a submodule
        self._parameters = inspect.signature(type(module).forward).parameters
        self._cache = next(name for name in CACHES if name in self._parameters)

    @torch.compiler.disable
    def __call__(self, hidden_states: Tensor, *arguments: Any, **named: Any) -> Any:
        module = self._module[0]
        current = carried(module)
        if current is None or not current.is_begun:
            return type(module).forward(module, hidden_states, *arguments, **named)
        positional = zip(list(self._parameters)[2:], arguments)
        others = {name: value for name, value in (*positional, *named.items()) if not isinstance(value, Tensor)}

        def run(hidden_SLD: Tensor, cache: Any) -> Tensor:
            forward = type(module).forward
            if cache is not None and has_kernels(hidden_SLD.device):
                from trimtab.models.recurrent_kernels import delta_net_output, step_forward

                if (out := delta_net_output(module, hidden_SLD, cache)) is not None:
                    return out
                forward = step_forward(forward) if hidden_SLD.shape[1] == 1 else forward
            out = forward(module, hidden_SLD, **others | {self._cache: cache})
            return out[0] if isinstance(out, tuple) else out

        return current.mix(module, run, hidden_states)
