"""The tasks of the supervised loop: SFT, distillation, DPO and its relatives, KTO, reward and process reward models.

The reference of DPO and KTO scores whole answers without gradient: in every step, or once before training with the
results cached on disk (--precompute_ref_log_probs).
"""

import copy
import hashlib
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from trimtab.algos.supervised_losses import (
    divergence,
    dpo_loss,
    hard_step_loss,
    ipo_loss,
    kl_baseline,
    kto_loss,
    log_odds_ratio,
    pairwise_loss,
    sft_loss_sum,
    soft_step_loss,
)
from trimtab.config.jobs import DPOOptions, KDOptions, KTOOptions, PRMOptions, RMOptions, SFTOptions
from trimtab.data.batches import TokenBatch
from trimtab.data.dataset import load_cached, save_cached
from trimtab.data.examples import (
    LabelledDataset,
    StepDataset,
    build_labelled_dataset,
    build_sft_dataset,
    build_step_dataset,
)
from trimtab.data.formats import reward_token_ids
from trimtab.data.rendering import progress
from trimtab.data.tokenizer import load_tokenizer
from trimtab.distributed.device import Device
from trimtab.distributed.fsdp import reshard_model, whole
from trimtab.errors import UserError
from trimtab.files import write_json
from trimtab.models.load import Loaded, fake_frozen_policy, fake_reward_model, load_reward_model
from trimtab.models.packed import scoring
from trimtab.models.policy import Policy, Teacher, check_vocabularies
from trimtab.models.reward import REWARDS, RewardModel
from trimtab.plan.workload import WITHOUT_REFERENCE
from trimtab.train.task import FrozenScorer, PairTask, SupervisedTask, sequence_log_probs
from trimtab.train.update import LossTerm, Totals, counts_by_sequence, sums_by_sequence


class SFTTask(SupervisedTask):
    options: SFTOptions | KDOptions
    verb = "sft"
    trains_answers = True

    def build_dataset(self, rows, what):
        return build_sft_dataset(rows, self.tokenizer, self.options, what=what)

    def make_batch(self, store, samples: list[int]) -> TokenBatch:
        return TokenBatch.of([store.example(i) for i in samples])

    def loss(self, model: Policy, batch: TokenBatch, totals: Totals) -> LossTerm:
        out = model(batch, router=self.balances_experts(model))
        loss = sft_loss_sum(out.log_probs_N) / totals["trained_tokens"]
        return self.share(loss, {}, out, model, batch, totals)


# ---- knowledge distillation


class KDTask(SFTTask):
    options: KDOptions
    verb = "kd"

    def attach(self, loaded: Loaded, device: Device) -> None:
        options = self.options
        how: dict[str, Any] = {"pretrain": options.teacher_model, "offload": options.teacher_offload}
        self.teacher = FrozenScorer(options, None, device, self.mesh, flag="--teacher_model", **how)
        self.scorers["teacher"] = self.teacher
        for root in (loaded.model, self.teacher.model):
            if root.path == "logits":
                raise UserError(f"{type(root.inner).__name__} has an LM head we cannot read; distil another model")
        # The loss computes the teacher's logits in chunks together with the student's, outside of the forward pass that
        # gathers a sharded teacher. So a sharded teacher needs a gathered copy of its head.
        model = self.teacher.model
        self.head = whole_head(model, device.torch) if self.teacher.is_split else model.head
        self.divergence = divergence(options.kd_loss, options.jsd_beta)

    def check_model(self, model: Policy) -> None:
        """Refuse a teacher with another vocabulary: distributions are compared token by token."""
        super().check_model(model)
        name = self.options.teacher_model
        theirs = load_tokenizer(name, disable_fast=self.options.disable_fast_tokenizer, flag="--teacher_model")
        check_vocabularies(model, fake_frozen_policy(name, flag="--teacher_model"), self.tokenizer, name)
        if theirs.get_vocab() != self.tokenizer.get_vocab():
            raise UserError(f"--teacher_model {name}: its tokenizer is not --pretrain's; use one that is")

    def prepare(self, model: Policy, batches: list[TokenBatch]) -> None:
        with self.teacher.at_work() as teacher:
            for batch in batches:
                batch.extra["teacher_ND"] = teacher(batch, hidden_only=True).hidden_ND
        self.head.to(self.teacher.device.torch)

    def loss(self, model: Policy, batch: TokenBatch, totals: Totals) -> LossTerm:
        teacher = Teacher(batch.extra["teacher_ND"], self.head, self.teacher.model.logit_shape, self.divergence)
        out = model(batch, router=self.balances_experts(model), teacher=teacher)
        nll = sft_loss_sum(out.log_probs_N) / totals["trained_tokens"]
        distance = out.divergence_N.sum() / totals["trained_tokens"]
        loss = (1 - self.options.kd_coef) * nll + self.options.kd_coef * distance
        return self.share(loss, {"nll": nll.detach(), "distance": distance.detach()}, out, model, batch, totals)


def whole_head(policy: Policy, device: torch.device) -> nn.Module:
    """A gathered copy of a sharded policy's head, without FSDP hooks."""
    head = copy.copy(policy.head)
    for hooks in ("_forward_pre_hooks", "_forward_hooks", "_forward_hooks_always_called"):
        setattr(head, hooks, OrderedDict())
    head._parameters = {
        name: None if parameter is None else nn.Parameter(whole(parameter).to(device), requires_grad=False)
        for name, parameter in policy.head._parameters.items()
    }
    return head


# ---- the reference of DPO and KTO


class ReferenceTask(SupervisedTask):
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


def precomputed(reference: FrozenScorer, task: SupervisedTask, store: Any) -> np.ndarray:
    """Reference log-probs of every sample of a store, [samples, sequences per sample], from the cache if present."""
    how = f"{reference.precision}/{reference.model.path}/{reference.device.torch.type}"
    key = f"{reference.weights}/{store.fingerprint}/{how}"
    name = f"reference-{hashlib.blake2b(key.encode(), digest_size=16).hexdigest()}"
    cached = load_cached(name) if task.caches else None
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
    if task.caches:
        save_cached(name, {"log_probs": table}, {})
    return table


# ---- DPO, cDPO, IPO, SimPO, ORPO


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
    trains_answers = True
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


# ---- reward models

MANY_PAIRS = 2000  # for the mean and spread of rewards when there is no evaluation set


class RMTask(PairTask):
    options: RMOptions
    verb = "rm"

    def build_dataset(self, rows, what):
        store, report = super().build_dataset(rows, what)
        if self.options.margin_loss and store.margins is None:
            raise UserError(f"--margin_loss: the {what} data have no column margin; add it or drop the option")
        return store, report

    def load_model(self, device: Device) -> Loaded:
        return load_reward_model(self.options, device, self.tokenizer, self.mesh)

    def skeleton(self) -> RewardModel:
        return fake_reward_model(self.options)

    def loss(self, model: RewardModel, batch: TokenBatch, totals: Totals) -> LossTerm:
        out = model(batch, router=self.balances_experts(model))
        chosen, rejected = out.scores_S[0::2], out.scores_S[1::2]
        margin = batch.extra["margin_P"] if self.options.margin_loss else None
        loss = pairwise_loss(chosen, rejected, margin).sum() / totals["pairs"]
        figures = {
            "accuracy": (chosen > rejected).float(),
            "chosen_reward": chosen.detach(),
            "rejected_reward": rejected.detach(),
        }
        figures = {name: value.sum() / totals["pairs"] for name, value in figures.items()}
        return self.share(loss, figures, out, model, batch, totals)

    def finish(self, model: RewardModel, folder: Path) -> None:
        """Store the mean and spread of rewards over the evaluation pairs, so that reward models can be compared."""
        evaluation = self.evaluation is not None
        store = self.evaluation if evaluation else self.store
        samples = list(range(len(store) if evaluation else min(len(store), MANY_PAIRS)))
        scores = []
        with scoring(model):
            for part in self.cut_all(store, samples):
                batch = self.make_batch(store, part).to(self.mesh.device)
                scores.append(model(batch).scores_S.view(-1, 2).cpu())
        pairs = torch.cat(scores).double()
        facts = {
            "mean": pairs.mean().item(),
            "std": pairs.std().item(),
            "value_head_prefix": self.options.value_head_prefix,
        }
        for name, value in facts.items():
            setattr(model.config, name, value)
        # An adapter's folder has no config.json, so the same facts are stored here.
        source = "evaluation" if evaluation else "training"
        if self.mesh.is_rank_zero:
            write_json(folder / REWARDS, {**facts, "source": source, "chosen_rejected": pairs.tolist()})


# ---- process reward models


class PRMTask(SupervisedTask):
    options: PRMOptions
    verb = "prm"

    def build_dataset(self, rows, what):
        return build_step_dataset(rows, self.tokenizer, self.options, what=what)

    def make_batch(self, store: StepDataset, samples: list[int]) -> TokenBatch:
        examples = [store.example(i) for i in samples]
        targets = torch.cat([torch.from_numpy(targets.copy()) for *_, targets in examples])
        if not store.soft:
            targets = targets.long()  # classes; probabilities stay floats
        return TokenBatch.of([(ids, marked) for ids, marked, _ in examples], targets_N=targets)

    def check_model(self, model: Policy) -> None:
        super().check_model(model)
        if model.path == "logits":
            raise UserError(f"--pretrain: cannot read step rewards off {type(model.inner).__name__}; use another model")

    def loss(self, model: Policy, batch: TokenBatch, totals: Totals) -> LossTerm:
        targets = batch.extra["targets_N"]
        choices = torch.tensor(self.choices(model), device=targets.device)
        out = model(batch, choices_K=choices, router=self.balances_experts(model))
        if targets.is_floating_point():
            losses = soft_step_loss(out.choices_NK, targets)
            right = (out.choices_NK[:, 0] > out.choices_NK[:, 1]) == (targets > 0.5)
        else:
            losses = hard_step_loss(out.choices_NK, targets)
            right = out.choices_NK.argmax(-1) == targets
        loss = losses.sum() / totals["trained_tokens"]
        figures = {"accuracy": right.sum() / totals["trained_tokens"]}
        return self.share(loss, figures, out, model, batch, totals)

    def choices(self, model: Policy) -> list[int]:
        """Token ids that the prediction chooses from: the reward tokens, or the whole vocabulary."""
        if self.options.reward_tokens:
            return reward_token_ids(self.options.reward_tokens, self.tokenizer)
        return list(range(model.head.out_features))
