"""DPO, cDPO, IPO, SimPO and ORPO as one task of the supervised loop."""

import torch
from torch import Tensor

from trimtab.algos.preference_losses import dpo_loss, ipo_loss, log_odds_ratio
from trimtab.config.jobs import DPOOptions
from trimtab.data.batches import TokenBatch
from trimtab.distributed.device import Device
from trimtab.distributed.fsdp import split_again
from trimtab.models.compile import AtWork
from trimtab.models.load import Loaded
from trimtab.models.packed import PackedModel
from trimtab.models.policy import Policy
from trimtab.train.launch import rehearse, train
from trimtab.train.pair_task import PairTask
from trimtab.train.reference import Reference, check_reference, precomputed
from trimtab.train.task import Share, Totals, counts_by_sequence, sums_by_sequence

WITHOUT_REFERENCE = ("orpo", "simpo")


class DPOTask(PairTask):
    options: DPOOptions
    verb = "dpo"
    reference: Reference | None = None
    tables: dict | None = None  # precomputed reference log-probs, by store

    def check_model(self, model: Policy) -> None:
        super().check_model(model)
        check_reference(self)

    def attach(self, loaded: Loaded, device: Device) -> None:
        if self.options.preference_loss in WITHOUT_REFERENCE:
            return
        options = self.options
        self.reference = Reference(
            options, loaded, device, self.mesh, pretrain=options.ref_pretrain, offload=options.ref_offload
        )
        if self.options.precompute_ref_log_probs:
            self.tables = {
                id(store): precomputed(self.reference, self, evaluation=store is self.evaluation)
                for store in (self.store, self.evaluation)
                if store is not None
            }
            self.reference = None
            split_again(loaded.model)

    def scorers(self) -> dict[str, tuple[PackedModel, AtWork]]:
        return {} if self.reference is None else {"reference": (self.reference.model, self.reference.at_work)}

    def make_batch(self, store, samples: list[int]) -> TokenBatch:
        batch = super().make_batch(store, samples)
        if self.tables is not None:
            batch.extra["reference_S"] = torch.from_numpy(self.tables[id(store)][samples]).flatten()
        return batch

    def prepare(self, model: Policy, batches: list[TokenBatch]) -> None:
        if self.reference is not None:
            self.reference.score(batches)

    def totals(self, batches: list[TokenBatch]) -> Totals:
        chosen = sum(int(counts_by_sequence(b)[0::2].sum()) for b in batches)
        return super().totals(batches) | {"chosen_tokens": chosen}

    def loss(self, model: Policy, batch: TokenBatch, totals: Totals) -> Share:
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


def train_dpo(options: DPOOptions) -> None:
    train(options, DPOTask)


def rehearse_dpo(options: DPOOptions) -> list[str]:
    return rehearse(options, DPOTask)
