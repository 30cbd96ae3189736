"""A model's own dropout: where it is, and how to switch it off.

What updates are compared with - a reference, the log-probs as they were sampled - is scored without dropout. With it a
policy differs from itself: DPO does not start at log 2, and PPO's ratio is not 1. Adapters bring dropout of their own,
which is added later and is left alone. Falcon's code reads its config in every pass: what that says (0 in all that are
published) stays.
"""

from collections.abc import Iterator

from torch import nn


def switch_off_dropout(model: nn.Module) -> bool:
    """Whether there was any. The model's config keeps what it says, for whoever loads the saved model."""
    found = list(_dropouts(model))
    for module, name in found:
        setattr(module, name, 0.0)
    return bool(found)


def has_dropout(model: nn.Module) -> bool:
    return any(True for _ in _dropouts(model))


def _dropouts(model: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Modules and the names of their probabilities above 0: dropout layers, and what attention layers and blocks hand
    to functions."""
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            names = ["p"]
        else:
            names = [name for name in vars(module) if "drop" in name]
        yield from ((module, name) for name in names if _is_probability(getattr(module, name)))


def _is_probability(value: object) -> bool:
    return isinstance(value, float) and value > 0
