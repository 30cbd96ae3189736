"""What a Learner compares its policy with: the model as it was before anything was learnt, or another one.

With adapters that is the policy without them. A model that was read from files is read from them again when it is first
asked; of a module that was given, which is trained in place, a copy is kept before its first update.
"""

import contextlib
import copy
from collections.abc import Iterator

from trimtab.config.jobs import LearnerOptions
from trimtab.distributed.device import Device
from trimtab.errors import UserError
from trimtab.models.load import Loaded, load_frozen_policy
from trimtab.models.lora import adapters_off
from trimtab.models.policy import Policy


class Reference:
    def __init__(self, options: LearnerOptions, loaded: Loaded, device: Device, name: str | None):
        """`name`: of another model."""
        self.options, self.loaded, self.device, self.name = options, loaded, device, name
        self._frozen: Policy | None = None

    @property
    def is_adapted(self) -> bool:
        """Whether it is the policy itself, without its adapters."""
        return self.name is None and self.options.lora_rank > 0

    @contextlib.contextmanager
    def at_work(self) -> Iterator[Policy]:
        """The reference, ready to score."""
        policy: Policy = self.loaded.model
        if self.is_adapted:
            with adapters_off(policy.model):
                yield policy
        else:
            yield self._found()

    def before_update(self) -> None:
        """The weights are about to change."""
        if self.name is None and self.options.pretrain is None and not self.is_adapted:
            self._found()

    @property
    def kept(self) -> Policy | None:
        """A copy of what the policy was, where there is one."""
        return self._frozen if self.name is None else None

    def _found(self) -> Policy:
        if self._frozen is None:
            self._frozen = self._copied() if self.name is None and self.options.pretrain is None else self._read()
        return self._frozen

    def _copied(self) -> Policy:
        policy: Policy = self.loaded.model
        model = copy.deepcopy(policy.inner)
        return Policy(model.requires_grad_(False), policy.path).eval()

    def _read(self) -> Policy:
        name = self.name or self.options.pretrain
        found = load_frozen_policy(name, self.options, self.device, flag="reference")
        if self.name is None and found.weights != self.loaded.weights:
            raise UserError(f"reference: {name} has other weights than when the Learner was made from it; name another")
        if found.model.head.out_features != self.loaded.model.head.out_features:
            raise UserError(f"reference: {name} has another vocabulary than the model; name one that shares it")
        return found.model
