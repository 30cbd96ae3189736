"""Supervised fine-tuning as a task of the supervised loop."""

from trimtab.algos.supervised_losses import sft_loss_sum
from trimtab.config.jobs import KDOptions, SFTOptions
from trimtab.data.batches import TokenBatch
from trimtab.data.tokens import build_sft_store
from trimtab.models.policy import Policy
from trimtab.train.launch import rehearse, train
from trimtab.train.task import Share, Task, Totals


class SFTTask(Task):
    options: SFTOptions | KDOptions
    verb = "sft"

    def build_store(self, rows, what):
        return build_sft_store(rows, self.tokenizer, self.options, what=what)

    def make_batch(self, store, samples: list[int]) -> TokenBatch:
        return TokenBatch.of([store.example(i) for i in samples])

    def loss(self, model: Policy, batch: TokenBatch, totals: Totals) -> Share:
        out = model(batch, router=self.balances_experts(model))
        loss = sft_loss_sum(out.log_probs_N) / totals["trained_tokens"]
        return self.share(loss, {}, out, model, batch, totals)


def train_sft(options: SFTOptions) -> None:
    train(options, SFTTask)


def rehearse_sft(options: SFTOptions) -> list[str]:
    return rehearse(options, SFTTask)
