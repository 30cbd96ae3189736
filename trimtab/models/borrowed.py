"""A second model on a policy's own weights: only its adapters are its own.

In one process its parameters are the policy's memory under another name. Where the policy is split over processes they
hold nothing, and are lent the gathered weights while the model works.
"""

import contextlib
import copy
from collections.abc import Iterator

import torch
from torch import nn

from trimtab.config.rl_jobs import RLOptions
from trimtab.distributed.device import Device
from trimtab.distributed.sharding import gathered
from trimtab.models.dropout import switch_off_dropout
from trimtab.models.filling import adapters_aside
from trimtab.models.load import prepare_training
from trimtab.models.lora import add_adapters
from trimtab.models.policy import Policy
from trimtab.models.selfcheck import use_attention

Place = tuple[nn.Module, str]


class BorrowingPolicy(Policy):
    """The policy's frozen or current weights, without its adapters if it has any, and adapters of its own."""

    def __init__(self, owner: Policy, options: RLOptions, device: Device, *, split: bool):
        """`options`: of the adapters; `split`: the owner is split over processes."""
        model, loans = _hollow(owner, options) if split else (_copy(owner), [])
        super().__init__(add_adapters(model, options), owner.path)
        if split:
            prepare_training(self, options, device)
        self._loans = loans
        self._give_back()
        # Not a part of this module: its weights are the policy's to train and to save.
        self._owner = [owner]
        self.train()

    @contextlib.contextmanager
    def at_work(self) -> Iterator[None]:
        """With the owner's weights. Every process must enter."""
        if not self._loans:
            yield
            return
        with gathered(self._owner[0]):
            for parameter, (module, name) in self._loans:
                parameter.data = getattr(module, name).data
            try:
                yield
            finally:
                self._give_back()

    def _give_back(self) -> None:
        for parameter, _ in self._loans:
            parameter.data = parameter.new_empty(0)


def _copy(owner: Policy) -> nn.Module:
    """The owner's modules without its adapters, on its own memory."""
    memo = {id(p): nn.Parameter(p.detach(), requires_grad=False) for p in owner.model.parameters()}
    model = copy.deepcopy(owner.model, memo | {id(buffer): buffer for buffer in owner.model.buffers()})
    return model.unload() if hasattr(model, "peft_config") else model


def _hollow(owner: Policy, options: RLOptions) -> tuple[nn.Module, list[tuple[nn.Parameter, Place]]]:
    """The same modules with parameters that take no memory, and where the owner has what they are to be lent."""
    with torch.device("meta"):
        model = type(owner.inner)._from_config(copy.deepcopy(owner.config), dtype=torch.float32)
    use_attention(model, owner.config._attn_implementation)
    if not options.keep_dropout:
        switch_off_dropout(model)
    made: dict[int, nn.Parameter] = {}
    loans = []
    with adapters_aside(owner.inner):
        for name, module in model.named_modules():
            theirs = owner.inner.get_submodule(name)
            module._buffers = dict(theirs._buffers)
            for leaf, parameter in module._parameters.items():
                if parameter is None:
                    continue
                # What is tied is told by the owner's parameters: files may hold two where the configuration ties.
                lent = id(getattr(theirs, leaf))
                if lent not in made:
                    hollow = torch.zeros((), device=owner.device).expand(parameter.shape)
                    made[lent] = nn.Parameter(hollow, requires_grad=False)
                    loans.append((made[lent], (theirs, leaf)))
                module._parameters[leaf] = made[lent]
    return model, loans
