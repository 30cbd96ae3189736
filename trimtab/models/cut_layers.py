"""How a module works on this process's parts of its parameters, in the ways of models/families.

A module keeps its class, its name and its code. While it works its parameters are this process's parts; what comes in
and goes out is branched and joined (distributed/branches). So a model's own code runs, in parts.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import Partial

from trimtab.distributed.branches import beside, branch, gather, join
from trimtab.distributed.sharding import local
from trimtab.models.vocabulary import Words

Arguments = tuple[Any, ...]


class Local:
    """On what is here: of a module that is whole everywhere all of it, in every process alike."""

    def __init__(self, module: nn.Module, group: ProcessGroup):
        self.group = group
        self._parameters: dict[str, nn.Parameter | None] = {}
        module.register_forward_pre_hook(self._before)
        module.register_forward_hook(self._after, always_call=True)

    def part(self, name: str, parameter: Tensor) -> Tensor | None:
        return local(parameter)

    def parts(self, module: nn.Module) -> dict[str, Tensor | None]:
        """What the module's parameters are while it works."""
        return {name: p if p is None else self.part(name, p) for name, p in module._parameters.items()}

    def of_whole_rows(self, largest_O: Tensor) -> Tensor:
        """From what is largest in a part of each row of the weight to what is largest in all of it."""
        return largest_O

    def enter(self, *arguments: Any) -> Arguments:
        return arguments

    def leave(self, result: Tensor) -> Tensor:
        return result

    def _before(self, module: nn.Module, arguments: Arguments) -> Arguments:
        arguments = self.enter(*arguments)
        self._parameters = dict(module._parameters)
        module._parameters.update(self.parts(module))
        return arguments

    def _after(self, module: nn.Module, arguments: Arguments, result: Tensor | None) -> Tensor | None:
        module._parameters.update(self._parameters)
        result = None if result is None else self.leave(result)  # None: it failed
        self._parameters = {}
        return result


class OfHeads(Local):
    """Every process has all of it and uses it on its own heads, so that gradients are still to be added up."""

    def part(self, name: str, parameter: Tensor) -> Tensor | None:
        return _part_to_be_added(parameter)


class Outputs(Local):
    """A linear layer cut by its outputs."""

    def enter(self, *arguments: Any) -> Arguments:
        return (branch(arguments[0], self.group), *arguments[1:])


class SomeRows(OfHeads):
    """A linear layer that every process has whole, and of which it computes some outputs."""

    def __init__(self, module: nn.Module, group: ProcessGroup, rows: list[int]):
        super().__init__(module, group)
        self.rows = torch.tensor(rows, device="cpu")  # a skeleton is built on another device

    def part(self, name: str, parameter: Tensor) -> Tensor | None:
        return _part_to_be_added(parameter).index_select(0, self.rows.to(parameter.device))


class Keys(SomeRows):
    """One of them whose input is what all have."""

    def enter(self, *arguments: Any) -> Arguments:
        return (branch(arguments[0], self.group), *arguments[1:])


class Inputs(Local):
    """A linear layer cut by its inputs. A bias is added once, to the sum."""

    def part(self, name: str, parameter: Tensor) -> Tensor | None:
        return None if name == "bias" else local(parameter)

    def of_whole_rows(self, largest_O: Tensor) -> Tensor:
        return gather(largest_O, self.group).amax(0)

    def leave(self, result: Tensor) -> Tensor:
        total, bias = join(result, self.group), self._parameters.get("bias")
        return total if bias is None else total + local(bias)


class Experts(Local):
    """(tokens, the experts of each, their weights): what experts are told by is alike, what they do is a part."""

    def enter(self, *arguments: Any) -> Arguments:
        hidden, chosen, weights = arguments
        return branch(hidden, self.group), chosen, branch(weights, self.group)

    def leave(self, result: Tensor) -> Tensor:
        return join(result, self.group)


class Branching(Local):
    """The first matrix of an adapter beside a layer that is cut by its outputs."""

    def leave(self, result: Tensor) -> Tensor:
        return branch(result, self.group)


class Embedding(Local):
    """Each process has the rows of some words."""

    def __init__(self, module: nn.Embedding, group: ProcessGroup):
        super().__init__(module, group)
        self.words = _words(module)
        if module.padding_idx is not None:  # the row that gets no gradient
            place = module.padding_idx - self.words.first
            module.padding_idx = place if 0 <= place < self.words.count else None
        self._here: Tensor | None = None

    def enter(self, *arguments: Any) -> Arguments:
        places, self._here = self.words.places(arguments[0])
        return (places,)

    def leave(self, result: Tensor) -> Tensor:
        here, self._here = self._here, None
        assert here is not None
        return join(result * here[..., None], self.group)


class Head(Outputs):
    """Each process has some words. Called as a module it gathers all logits; log-probs are made without them
    (models/lm_head)."""

    def __init__(self, module: nn.Linear, group: ProcessGroup):
        super().__init__(module, group)
        self.words = _words(module)

    def leave(self, result: Tensor) -> Tensor:
        return beside(result, self.group, self.words.widths)


class DropoutOfPart(nn.Dropout):
    """On some columns of what is dropped from: all processes draw the mask of all columns alike, as one would."""

    def __init__(self, p: float, width: int, columns: slice):
        super().__init__(p)
        self.width, self.columns = width, columns

    def forward(self, input: Tensor) -> Tensor:
        if not self.training:
            return input
        mask = nn.functional.dropout(input.new_ones(*input.shape[:-1], self.width), self.p)
        return input * mask[..., self.columns]


def way_of_work(module: nn.Module) -> Local | None:
    """How a module works on its parts; None: it is not cut."""
    hooks = (getattr(hook, "__self__", None) for hook in module._forward_pre_hooks.values())
    return next((way for way in hooks if isinstance(way, Local)), None)


def _words(module: nn.Embedding | nn.Linear) -> Words:
    words = Words.of(module.weight)
    assert words is not None
    return words


def _part_to_be_added(parameter: Tensor) -> Tensor:
    """All of a parameter, whose gradient is only this process's share."""
    return parameter.to_local(grad_placements=[Partial()])
