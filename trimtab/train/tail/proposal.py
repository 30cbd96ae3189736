"""The learners of a tail method: the policy, and RePULSe's proposal.

The proposal is a language model q of its own, adapters on the policy's weights, or what modulates the policy: a head,
or a model of its own. Adapters and heads work on the policy's weights: every process holds all that they learn, and
their gradients are averaged.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from trimtab.data.batches import TokenBatch
from trimtab.distributed.fsdp import whole
from trimtab.models.packed import scoring
from trimtab.models.proposal_policies import TwistedPolicy, TwistModel
from trimtab.train.pass_limit import memory_guard
from trimtab.train.rl.micro_batches import Slice, batches_of
from trimtab.train.rl.trainer import PolicyTrainer, fetched
from trimtab.train.tail.objective import policy_share, twist_share
from trimtab.train.task import Share, Totals

TWIST = "twist.safetensors"


class TailActor(PolicyTrainer):
    """The policy."""

    def share(self, batch: TokenBatch, totals: Totals, **settings: Any) -> Share:
        return policy_share(self.model, batch, totals)


class ProposalModel(PolicyTrainer):
    """A language model q of its own: log psi = log q - log p, with p as it was."""

    def share(self, batch: TokenBatch, totals: Totals, **settings: Any) -> Share:
        return twist_share(self.model(batch).log_probs_N - batch.extra["policy_N"], batch, totals)


class BorrowingProposal(ProposalModel):
    """Adapters on the policy's weights."""

    def update(self, slices: Sequence[Slice], **settings: Any) -> dict[str, float]:
        with self.model.at_work():
            return super().update(slices, **settings)

    def gather_gradients(self) -> None:
        gradients = self.optimiser.accumulated
        for name, parameter in self.optimiser.working.items():
            if name in gradients:
                gradients[name] = self.mesh.gradients.sum(gradients[name]) / self.mesh.gradients.size
            else:
                parameter.grad = self.mesh.gradients.sum(parameter.grad) / self.mesh.gradients.size

    def log_probs(self, slices: Sequence[Slice]) -> list[Tensor]:
        with self.model.at_work():
            return super().log_probs(slices)

    def write_model(self, folder: Path) -> None:
        """The adapters; their base is the policy, which lies in the folder above, or what it began with."""
        if self.mesh.leads:
            if self.options.lora_rank == 0:
                self.model.model.active_peft_config.base_model_name_or_path = str(folder.parent)
            self.model.model.save_pretrained(folder)


class Modulation(BorrowingProposal):
    """A head on the policy's hidden states, whose output is log psi."""

    def share(self, batch: TokenBatch, totals: Totals, **settings: Any) -> Share:
        return twist_share(self.model.log_twists(batch), batch, totals)

    def log_twists(self, slices: Sequence[Slice]) -> list[Tensor]:
        with memory_guard(), self.model.at_work(), scoring(self.model):
            return fetched([self.model.log_twists(batch.to(self.device.torch)) for batch in batches_of(slices)])

    def write_model(self, folder: Path) -> None:
        if self.mesh.leads:
            folder.mkdir(parents=True, exist_ok=True)
            save_file(self.model.twist.state_dict(), folder / TWIST)


class ModulationModel(ProposalModel):
    """A model of its own, whose output is log psi."""

    model: TwistModel

    def __init__(self, modulated: TwistedPolicy, *parts: Any):
        super().__init__(*parts)
        self.modulated = modulated

    def share(self, batch: TokenBatch, totals: Totals, **settings: Any) -> Share:
        return twist_share(self.model(batch), batch, totals)

    def log_twists(self, slices: Sequence[Slice]) -> list[Tensor]:
        with memory_guard(), scoring(self.model):
            return fetched([self.model(batch.to(self.device.torch)) for batch in batches_of(slices)])

    def log_probs(self, slices: Sequence[Slice]) -> list[Tensor]:
        with memory_guard(), self.modulated.at_work(), scoring(self.modulated):
            found = [self.modulated(batch.to(self.device.torch)).log_probs_N for batch in batches_of(slices)]
            return fetched(found)

    def write_model(self, folder: Path) -> None:
        weights = {name: whole(value) for name, value in self.model.twist.state_dict().items()}
        super().write_model(folder)
        if self.mesh.leads:
            save_file(weights, folder / TWIST)
