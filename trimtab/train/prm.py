"""Process reward models as a task of the supervised loop."""

import torch

from trimtab.algos.preference_losses import hard_step_loss, soft_step_loss
from trimtab.config.jobs import PRMOptions
from trimtab.data.batches import TokenBatch
from trimtab.data.step_formats import reward_token_ids
from trimtab.data.steps import StepStore, build_step_store
from trimtab.errors import UserError
from trimtab.models.policy import Policy
from trimtab.train.launch import rehearse, train
from trimtab.train.task import Share, Task, Totals


class PRMTask(Task):
    options: PRMOptions
    verb = "prm"

    def build_store(self, rows, what):
        return build_step_store(rows, self.tokenizer, self.options, what=what)

    def make_batch(self, store: StepStore, samples: list[int]) -> TokenBatch:
        examples = [store.example(i) for i in samples]
        targets = torch.cat([torch.from_numpy(targets.copy()) for *_, targets in examples])
        if not store.soft:
            targets = targets.long()  # classes; probabilities stay floats
        return TokenBatch.of([(ids, marked) for ids, marked, _ in examples], targets_N=targets)

    def check_model(self, model: Policy) -> None:
        super().check_model(model)
        if model.path == "logits":
            raise UserError(f"--pretrain: cannot read step rewards off {type(model.inner).__name__}; use another model")

    def loss(self, model: Policy, batch: TokenBatch, totals: Totals) -> Share:
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
        """Token ids the prediction is taken among: the reward tokens, or the model's whole vocabulary."""
        if self.options.reward_tokens:
            return reward_token_ids(self.options.reward_tokens, self.tokenizer)
        return list(range(model.head.out_features))


def train_prm(options: PRMOptions) -> None:
    train(options, PRMTask)


def rehearse_prm(options: PRMOptions) -> list[str]:
    return rehearse(options, PRMTask)
