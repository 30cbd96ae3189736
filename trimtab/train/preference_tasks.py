"""DPO (with cDPO, IPO, SimPO, ORPO) and KTO as tasks of the supervised loop, and their reference model.

The reference scores whole answers without gradient: in every step, or once before training with the results cached on
disk (--precompute_ref_log_probs).
"""

import hashlib
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trimtab.algos.preference_losses import dpo_loss, ipo_loss, kl_baseline, kto_loss, log_odds_ratio
from trimtab.config.jobs import DPOOptions, KTOOptions
from trimtab.data.batches import TokenBatch
from trimtab.data.dataset import load_cached, save_cached
from trimtab.data.examples import LabelledDataset, build_labelled_dataset
from trimtab.data.rendering import progress
from trimtab.data.tokenizer import load_tokenizer
from trimtab.distributed.device import Device
from trimtab.distributed.fsdp import reshard_model
from trimtab.errors import UserError
from trimtab.models.load import Loaded
from trimtab.models.packed import scoring
from trimtab.models.policy import Policy
from trimtab.plan.workload import WITHOUT_REFERENCE
from trimtab.train.task import FrozenScorer, PairTask, Task, sequence_log_probs
from trimtab.train.update import LossTerm, Totals, counts_by_sequence, sums_by_sequence


class ReferenceTask(Task):
    """A task whose loss compares the model's log-probs of answers with a reference model's."""

    options: DPOOptions | KTOOptions

    def check_model(self, model: Policy) -> None:
        """Refuse a --ref_pretrain whose tokenizer maps the data's token ids to other tokens."""
        super().check_model(model)
        name = self.options.ref_pretrain
        if name is None:
            return
        ids = self.token_ids().tolist()
        theirs = load_tokenizer(name, disable_fast=self.options.disable_fast_tokenizer, flag="--ref_pretrain")
        for number, ours, other in zip(ids, *(t.convert_ids_to_tokens(ids) for t in (self.tokenizer, theirs))):
            if ours != other:
                raise UserError(
                    f"--ref_pretrain {name}: its token {number} is {other!r}, --pretrain's is {ours!r}; "
                    "a reference must have the same tokenizer"
                )

    def attach(self, loaded: Loaded, device: Device) -> None:
        how: dict[str, Any] = {"pretrain": self.options.ref_pretrain, "offload": self.options.ref_offload}
        self.scorers["reference"] = FrozenScorer(self.options, loaded, device, self.mesh, **how)


def precomputed(reference: FrozenScorer, task: Task, store: Any) -> np.ndarray:
    """Reference log-probs of every sample of a store, [samples, sequences per sample], from the cache if present."""
    how = f"{reference.precision}/{reference.model.path}/{reference.device.torch.type}"
    key = f"{reference.weights}/{store.fingerprint}/{how}"
    name = f"reference-{hashlib.blake2b(key.encode(), digest_size=16).hexdigest()}"
    cached = load_cached(name)
    if not task.mesh.all.any(cached is None):  # processes that share rows or a model must score together
        assert cached is not None
        return cached[0]["log_probs"]
    found: dict[int, np.ndarray] = {}
    groups = task.cut_all(store, list(range(len(store))))
    with reference.at_work() as model:
        for samples in progress(groups, len(groups), "scoring with the reference"):
            batch = task.make_batch(store, samples).to(reference.device.torch)
            values = sequence_log_probs(model, batch).view(len(samples), -1).cpu().numpy()
            found.update(zip(samples, values))
    table = np.stack([found[i] for i in range(len(store))])
    save_cached(name, {"log_probs": table}, {})
    return table


# ---- DPO and its relatives


class DPOTask(ReferenceTask, PairTask):
    options: DPOOptions
    verb = "dpo"
    tables: dict | None = None  # precomputed reference log-probs, by store

    def attach(self, loaded: Loaded, device: Device) -> None:
        if self.options.preference_loss in WITHOUT_REFERENCE:
            return
        super().attach(loaded, device)
        if self.options.precompute_ref_log_probs:
            reference, stores = self.scorers.pop("reference"), (self.store, self.evaluation)
            self.tables = {id(store): precomputed(reference, self, store) for store in stores if store is not None}
            reshard_model(loaded.model)

    def make_batch(self, store, samples: list[int]) -> TokenBatch:
        batch = super().make_batch(store, samples)
        if self.tables is not None:
            batch.extra["reference_S"] = torch.from_numpy(self.tables[id(store)][samples]).flatten()
        return batch

    def prepare(self, model: Policy, batches: list[TokenBatch]) -> None:
        for reference in self.scorers.values():
            reference.score(batches)

    def totals(self, batches: list[TokenBatch]) -> Totals:
        chosen = sum(int(counts_by_sequence(b)[0::2].sum()) for b in batches)
        return super().totals(batches) | {"chosen_tokens": chosen}

    def loss(self, model: Policy, batch: TokenBatch, totals: Totals) -> LossTerm:
        out = model(batch, router=self.balances_experts(model))
        sums_S = sums_by_sequence(out.log_probs_N, batch)
        losses_P, rewards_S = self.preference(sums_S, batch)
        loss = losses_P.sum() / totals["pairs"]
        chosen, rejected = rewards_S.detach()[0::2], rewards_S.detach()[1::2]
        figures = {
            "accuracy": (chosen > rejected).float(),
            "chosen_reward": chosen,
            "rejected_reward": rejected,
            "reward_margin": chosen - rejected,
        }
        figures = {name: value.sum() / totals["pairs"] for name, value in figures.items()}
        weight = self.options.nll_loss_coef + (self.options.preference_loss == "orpo")
        if weight > 0:
            nll = -sums_S[0::2].sum() / totals["chosen_tokens"]
            figures["nll"] = nll.detach()
            loss = loss + weight * nll
        return self.share(loss, figures, out, model, batch, totals)

    def preference(self, sums_S: Tensor, batch: TokenBatch) -> tuple[Tensor, Tensor]:
        """Loss of each pair, and the implicit reward of each answer."""
        options = self.options
        if options.preference_loss in WITHOUT_REFERENCE:
            values_S = sums_S / counts_by_sequence(batch)
            chosen, rejected = values_S[0::2], values_S[1::2]
            if options.preference_loss == "simpo":
                losses = dpo_loss(chosen - rejected, options.beta, margin=options.simpo_gamma)
            else:
                losses = options.beta * dpo_loss(log_odds_ratio(chosen, rejected), beta=1.0)
            return losses, options.beta * values_S
        ratios_S = sums_S - batch.extra["reference_S"]
        if options.preference_loss == "ipo_mean":
            ratios_S = ratios_S / counts_by_sequence(batch)
        h_P = ratios_S[0::2] - ratios_S[1::2]
        if options.preference_loss in ("ipo", "ipo_mean"):
            return ipo_loss(h_P, options.beta), options.beta * ratios_S
        return dpo_loss(h_P, options.beta, options.label_smoothing), options.beta * ratios_S


# ---- KTO


class KTOTask(ReferenceTask):
    """KTO: each batch holds its answers, and the mismatched pairs from which the step's KL is estimated."""

    options: KTOOptions
    verb = "kto"
    scores_model = True

    def build_dataset(self, rows, what):
        return build_labelled_dataset(rows, self.tokenizer, self.options, what=what)

    def __init__(self, options: KTOOptions, tokenizer: Any):
        super().__init__(options, tokenizer)
        self.partners = {id(store): np.arange(len(store)) for store in (self.store, self.evaluation) if store}

    def cut(self, store: LabelledDataset, samples: list[int]) -> list[list[int]]:
        # Each prompt is paired with the answer of the step's next sample, whatever micro-batch that is in.
        self.partners[id(store)][samples] = np.roll(samples, -1)
        return super().cut(store, samples)

    def make_batch(self, store: LabelledDataset, samples: list[int]) -> TokenBatch:
        batch = TokenBatch.of([store.example(i) for i in samples], good_S=torch.from_numpy(store.labels[samples]))
        partner = self.partners[id(store)]
        batch.beside = TokenBatch.of([store.mismatched(i, int(partner[i])) for i in samples])
        return batch

    def prepare(self, model: Policy, batches: list[TokenBatch]) -> None:
        mismatched = [b.beside for b in batches if b.beside is not None]
        self.scorers["reference"].score([*batches, *mismatched])
        with scoring(model):
            ratios = [sequence_log_probs(model, b) - b.extra["reference_S"] for b in mismatched]
            local = torch.stack([r.sum() * b.weight for r, b in zip(ratios, batches)]).sum()
        counts = torch.tensor(float(sum(len(b.spans) * b.weight for b in batches)), device=local.device)
        total, count = self.mesh.data.sum(torch.stack([local, counts]))
        # A step of one sample has no other answer to mismatch its prompt with.
        z = kl_baseline(total / count) if count > 1 else torch.zeros_like(total)
        for batch in batches:
            batch.extra["kl"] = z

    def loss(self, model: Policy, batch: TokenBatch, totals: Totals) -> LossTerm:
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
