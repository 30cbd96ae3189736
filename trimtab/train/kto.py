"""KTO as a task of the supervised loop."""

from typing import Any

import numpy as np
import torch

from trimtab.algos.preference_losses import kl_baseline, kto_loss
from trimtab.config.jobs import KTOOptions
from trimtab.data.batches import TokenBatch
from trimtab.data.labelled import LabelledStore, build_labelled_store
from trimtab.distributed.device import Device
from trimtab.models.compile import AtWork
from trimtab.models.load import Loaded
from trimtab.models.packed import PackedModel, scoring
from trimtab.models.policy import Policy
from trimtab.train.launch import rehearse, train
from trimtab.train.reference import Reference, check_reference, sequence_log_probs
from trimtab.train.task import Share, Task, Totals, sums_by_sequence


class KTOTask(Task):
    """Every batch carries its answers and, besides, the mismatched pairs that the step's KL is estimated from."""

    options: KTOOptions
    verb = "kto"
    scores_model = True

    def build_store(self, rows, what):
        return build_labelled_store(rows, self.tokenizer, self.options, what=what)

    def __init__(self, options: KTOOptions, tokenizer: Any):
        super().__init__(options, tokenizer)
        self.partners = {id(store): np.arange(len(store)) for store in (self.store, self.evaluation) if store}

    def cut(self, store: LabelledStore, samples: list[int]) -> list[list[int]]:
        # Each prompt is paired with the answer of the step's next sample, whatever micro-batch that is in.
        self.partners[id(store)][samples] = np.roll(samples, -1)
        return super().cut(store, samples)

    def make_batch(self, store: LabelledStore, samples: list[int]) -> TokenBatch:
        batch = TokenBatch.of([store.example(i) for i in samples], good_S=torch.from_numpy(store.labels[samples]))
        partner = self.partners[id(store)]
        batch.beside = TokenBatch.of([store.mismatched(i, int(partner[i])) for i in samples])
        return batch

    def check_model(self, model: Policy) -> None:
        super().check_model(model)
        check_reference(self)

    def attach(self, loaded: Loaded, device: Device) -> None:
        options = self.options
        self.reference = Reference(
            options, loaded, device, self.mesh, pretrain=options.ref_pretrain, offload=options.ref_offload
        )

    def scorers(self) -> dict[str, tuple[PackedModel, AtWork]]:
        return {"reference": (self.reference.model, self.reference.at_work)}

    def prepare(self, model: Policy, batches: list[TokenBatch]) -> None:
        mismatched = [b.beside for b in batches if b.beside is not None]
        self.reference.score([*batches, *mismatched])
        with scoring(model):
            ratios = [sequence_log_probs(model, b) - b.extra["reference_S"] for b in mismatched]
            local = torch.stack([r.sum() * b.weight for r, b in zip(ratios, batches)]).sum()
        counts = torch.tensor(float(sum(len(b.spans) * b.weight for b in batches)), device=local.device)
        total, count = self.mesh.data.sum(torch.stack([local, counts]))
        # A step of one sample has no other answer to mismatch its prompt with.
        z = kl_baseline(total / count) if count > 1 else torch.zeros_like(total)
        for batch in batches:
            batch.extra["kl"] = z

    def loss(self, model: Policy, batch: TokenBatch, totals: Totals) -> Share:
        options, good, z = self.options, batch.extra["good_S"], batch.extra["kl"]
        out = model(batch, router=self.balances_experts(model))
        ratios = sums_by_sequence(out.log_probs_N, batch) - batch.extra["reference_S"]
        weights = options.desirable_loss_weight, options.undesirable_loss_weight
        loss = kto_loss(ratios, good, z, options.beta, *weights).sum() / totals["sequences"]
        rewards = options.beta * ratios.detach()
        figures = {
            "kl": z * (len(batch.spans) / totals["sequences"]),
            "chosen_reward": rewards[good].sum() / max(1, totals["good"]),
            "rejected_reward": rewards[~good].sum() / max(1, totals["sequences"] - totals["good"]),
        }
        return self.share(loss, figures, out, model, batch, totals)

    def totals(self, batches: list[TokenBatch]) -> Totals:
        return super().totals(batches) | {"good": sum(int(b.extra["good_S"].sum()) for b in batches)}


def train_kto(options: KTOOptions) -> None:
    train(options, KTOTask)


def rehearse_kto(options: KTOOptions) -> list[str]:
    return rehearse(options, KTOTask)
