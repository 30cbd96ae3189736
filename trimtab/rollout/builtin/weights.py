"""Whether a policy still is what it was: keys and values that other weights have made must not be read."""

import torch

from trimtab.distributed.device import widest
from trimtab.models.policy import Policy

_LOOKED_AT = 16  # numbers of every tensor


def switches(policy: Policy) -> tuple:
    """Adapters on or off, and functions that stand in for a module's own."""
    adapters = tuple(
        (module._disable_adapters, tuple(module.active_adapters), tuple(module.scaling.items()))
        for module in policy.modules()
        if hasattr(module, "_disable_adapters") and hasattr(module, "scaling")
    )
    return adapters, sum("forward" in vars(module) for module in policy.modules())


def is_split(policy: Policy) -> bool:
    """Over processes."""
    return any(hasattr(module, "unshard") for module in policy.modules())


@torch.no_grad()
def state_of(policy: Policy) -> tuple:
    """Differs after every change: torch counts what is written in place, and to numbers that were written past its
    count, through `.data`, a few are looked at in every tensor."""
    tensors = [*policy.parameters(), *policy.buffers()]
    counted = tuple((tensor.data_ptr(), tensor._version) for tensor in tensors)
    wide = widest(policy.device)
    looked_at = [tensor.reshape(-1)[:: max(1, tensor.numel() // _LOOKED_AT)].to(wide) for tensor in tensors]
    numbers = torch.cat(looked_at).cpu().numpy().tobytes() if looked_at else b""
    return counted, switches(policy), numbers
