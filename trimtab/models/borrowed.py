"""A second model on a policy's own weights: only its adapters are its own.

In one process its parameters are the policy's memory under another name. Where the policy is split over processes they
hold nothing, and are lent the gathered weights while the model works.
"""

import contextlib
import copy
from collections.abc import Iterator

from torch import nn

from trimtab.config.groups import LoraOptions
from trimtab.distributed.sharding import gathered
from trimtab.models.lora import add_adapters
from trimtab.models.policy import Policy


class BorrowingPolicy(Policy):
    """The policy's frozen or current weights, without its adapters if it has any, and adapters of its own."""

    def __init__(self, owner: Policy, options: LoraOptions, *, split: bool):
        """`options`: of the adapters; `split`: the owner will be split over processes."""
        borrowed = {id(p): nn.Parameter(p.detach(), requires_grad=False) for p in owner.model.parameters()}
        memo = borrowed | {id(buffer): buffer for buffer in owner.model.buffers()}
        model = copy.deepcopy(owner.model, memo)
        if hasattr(model, "peft_config"):
            model = model.unload()
        super().__init__(add_adapters(model, options), owner.path)
        self._loans = [(borrowed[id(p)], module, name) for module, name, p in _placed(owner.model)] if split else []
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
            for parameter, module, name in self._loans:
                parameter.data = getattr(module, name).data
            try:
                yield
            finally:
                self._give_back()

    def _give_back(self) -> None:
        for parameter, _, _ in self._loans:
            parameter.data = parameter.new_empty(0)


def _placed(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            yield module, name, parameter
