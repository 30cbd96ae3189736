"""Linear layers with low-rank adapters (PEFT's), as what kernels need to know of them.

    y = W x + b + s B (A x)

Merging s B A into W for a rollout would be faster still, and wrong: in half precision a weight does not change by less
than half of its last bit, and what a few optimiser steps write into B is less. The rollout would be the base model's.
"""

from dataclasses import dataclass

from torch import Tensor, nn


@dataclass(frozen=True, eq=False)
class Adapted:
    """A linear layer that kernels can multiply by. One without an adapter has neither A nor B."""

    weight_OI: Tensor
    bias_O: Tensor | None
    a_RI: Tensor | None = None
    b_OR: Tensor | None = None
    scale: float = 0.0

    @property
    def rank(self) -> int:
        return 0 if self.a_RI is None else len(self.a_RI)


def adapted(module: nn.Module) -> Adapted | None:
    """None: only the module itself knows what it does (4-bit or int8 weights, DoRA, several adapters at once)."""
    if type(module) is nn.Linear:
        return None if "forward" in vars(module) else Adapted(module.weight, module.bias)
    if not hasattr(module, "lora_A"):
        return None
    from peft.tuners.lora import Linear

    if type(module) is not Linear or type(module.base_layer) is not nn.Linear or "forward" in vars(module.base_layer):
        return None
    weight, bias = module.base_layer.weight, module.base_layer.bias
    if module.disable_adapters or module.merged:
        return None if module.disable_adapters and module.merged else Adapted(weight, bias)
    names = [name for name in module.active_adapters if name in module.lora_A]
    if not names:
        return Adapted(weight, bias)
    a, b = module.lora_A[names[0]], module.lora_B[names[0]]
    if len(names) > 1 or names[0] in module.lora_variant or b.bias is not None:
        return None
    return Adapted(weight, bias, a.weight, b.weight, module.scaling[names[0]])
