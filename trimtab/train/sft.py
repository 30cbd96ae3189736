"""Supervised fine-tuning as a task of the supervised loop."""

from trimtab.algos.moe_balance import load_balancing_loss
from trimtab.algos.sft import sft_loss_sum
from trimtab.config.jobs import SFTOptions
from trimtab.data.batches import TokenBatch
from trimtab.data.packing import chunk, pack
from trimtab.data.sources import load_evaluation_rows, load_rows
from trimtab.data.tokens import build_sft_store
from trimtab.errors import UserError
from trimtab.models.policy import Policy
from trimtab.train.launch import rehearse, train
from trimtab.train.task import Share, Totals


class SFTTask:
    verb = "sft"

    def __init__(self, options: SFTOptions, tokenizer):
        self.options = options
        rows = load_rows(
            options.dataset,
            probabilities=options.dataset_probs,
            split=options.dataset_split,
            max_samples=options.max_samples,
            seed=options.seed,
        )
        self.store, self.report = build_sft_store(rows, tokenizer, options)
        evaluation_rows = load_evaluation_rows(options)
        self.evaluation = self.evaluation_report = None
        if evaluation_rows is not None:
            self.evaluation, self.evaluation_report = build_sft_store(
                evaluation_rows, tokenizer, options, what="evaluation"
            )
        self.samples = len(self.store)
        self.evaluation_samples = len(self.evaluation) if self.evaluation is not None else 0
        self.data_fingerprint = self.store.fingerprint

    def describe_data(self) -> dict:
        described = dict(self.report.as_dict())
        if self.evaluation_report is not None:
            described["evaluation"] = self.evaluation_report.as_dict()
        return described

    def data_lines(self) -> list[str]:
        reports = [self.report] + ([self.evaluation_report] if self.evaluation_report is not None else [])
        return [line for report in reports for line in report.lines()]

    def micro_batches(self, samples: list[int], *, evaluation: bool = False) -> list[TokenBatch]:
        store = self.evaluation if evaluation else self.store
        lengths = [int(store.lengths[i]) for i in samples]
        if self.options.packing_samples:
            cut = pack(lengths, token_budget(self.options))
        else:
            cut = chunk(lengths, self.options.micro_train_batch_size)
        return [TokenBatch.of([store.example(samples[i]) for i in members]) for members in cut]

    def totals(self, batches: list[TokenBatch]) -> Totals:
        return {"tokens": sum(b.tokens for b in batches), "trained_tokens": sum(b.trained_tokens for b in batches)}

    def loss(self, policy: Policy, batch: TokenBatch, totals: Totals) -> Share:
        balance = self.options.aux_loss_coef if policy.training else 0.0
        out = policy(batch, router=balance > 0)
        loss = sft_loss_sum(out.log_probs_N) / totals["trained_tokens"]
        figures = {"loss": loss.detach()}
        if balance > 0:
            auxiliary = load_balancing_loss(out.router_logits, policy.config.num_experts_per_tok)
            auxiliary = auxiliary * (batch.tokens / totals["tokens"])
            figures["aux_loss"] = auxiliary.detach()
            loss = loss + balance * auxiliary
        return Share(loss, figures)

    def check_model(self, policy: Policy) -> None:
        check_experts(self.options.aux_loss_coef, policy)
        check_vocabulary(int(self.store.ids.max()), policy)


def token_budget(options: SFTOptions) -> int:
    """Tokens a packed row may hold."""
    return options.train_max_tokens_per_gpu or options.micro_train_batch_size * options.max_len


def check_experts(aux_loss_coef: float, policy: Policy) -> None:
    if aux_loss_coef <= 0:
        return
    if not hasattr(policy.config, "num_experts_per_tok"):
        raise UserError(f"--aux_loss_coef {aux_loss_coef}: {type(policy.inner).__name__} has no experts; drop it")
    if policy.path == "logits":
        raise UserError(f"--aux_loss_coef {aux_loss_coef}: cannot read the routers of {type(policy.inner).__name__}")


def check_vocabulary(largest_id: int, policy: Policy) -> None:
    known = policy.config.get_text_config().vocab_size
    if largest_id >= known:
        raise UserError(
            f"--pretrain: its tokenizer made token {largest_id} of this data, but the model knows only {known} tokens; "
            "the tokenizer in this folder is another model's"
        )


def train_sft(options: SFTOptions) -> None:
    train(options, SFTTask)


def rehearse_sft(options: SFTOptions) -> list[str]:
    return rehearse(options, SFTTask)
