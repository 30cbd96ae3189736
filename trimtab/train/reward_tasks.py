"""Reward models from preference pairs (rm) and process reward models (prm) as tasks of the supervised loop."""

from pathlib import Path

import torch

from trimtab.algos.preference_losses import hard_step_loss, pairwise_loss, soft_step_loss
from trimtab.config.jobs import PRMOptions, RMOptions
from trimtab.data.batches import TokenBatch
from trimtab.data.examples import StepDataset, build_step_dataset
from trimtab.data.formats import reward_token_ids
from trimtab.distributed.device import Device
from trimtab.errors import UserError
from trimtab.files import write_json
from trimtab.models.load import Loaded, fake_reward_model, load_reward_model
from trimtab.models.packed import scoring
from trimtab.models.policy import Policy
from trimtab.models.reward import REWARDS, RewardModel
from trimtab.train.task import PairTask, Task
from trimtab.train.update import LossTerm, Totals

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


class PRMTask(Task):
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
