"""Tasks of the supervised loop: dataset, micro-batches and loss of a job, and frozen models that score.

A job is a subclass of SupervisedTask that builds its store, collates samples into batches, and computes a micro-batch's
share of the step's loss. The rest is the same for all jobs.
"""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from trimtab.config.jobs import DPOOptions, RMOptions, SupervisedOptions
from trimtab.data.batches import SampleOrder, TokenBatch, chunk, pack
from trimtab.data.data_files import locations_of
from trimtab.data.dataset import beginnings, count_shared
from trimtab.data.examples import PairDataset, build_pair_dataset
from trimtab.data.sources import load_evaluation_rows, load_rows
from trimtab.distributed.device import Device
from trimtab.distributed.mesh import Mesh
from trimtab.errors import UserError
from trimtab.models.load import Loaded, TrainedModelOptions, fake_policy, load_frozen_policy, load_policy
from trimtab.models.lora import adapters_off
from trimtab.models.packed import PackedModel, learned_positions
from trimtab.models.parallel.sharded_model import FrozenPlacement, enable_context_parallel, is_frozen_sharded
from trimtab.models.policy import Policy
from trimtab.models.reward import REWARDS
from trimtab.train.update import LossTerm, MicroBatchLimit, Totals, balance_loss_term, sums_by_sequence


class SupervisedTask:
    """Base class of supervised jobs."""

    verb: str
    mesh = Mesh()  # the processes that share a step; set before training
    sequences_a_sample = 1
    trains_answers = False  # whether the trained tokens are the answers of the rows
    scores_model = False  # whether every step also runs the model without gradients
    padded = False  # the model takes padded rows, whose memory a token budget would not bound
    caches = True  # what is computed once of all samples is kept on disk

    def __init__(self, options: SupervisedOptions, tokenizer: PreTrainedTokenizerBase):
        self.micro_batch_limit = MicroBatchLimit()
        self.scorers: dict[str, FrozenScorer] = {}
        self.options, self.tokenizer = options, tokenizer
        rows = load_rows(
            options.dataset,
            probabilities=options.dataset_probs,
            split=options.dataset_split,
            max_samples=options.max_samples,
            seed=options.seed,
        )
        self.rows, self._places = rows, locations_of(rows, "the train data")
        self.store, self.report = self.build_dataset(rows, "train")
        self.evaluation: Any = None
        self.evaluation_report: Any = None
        evaluation_rows = load_evaluation_rows(options)
        if evaluation_rows is not None:
            self.evaluation, self.evaluation_report = self.build_dataset(evaluation_rows, "evaluation")
            shared = count_shared(_prompts_of(self.store), _prompts_of(self.evaluation))
            self.evaluation_report.rows_also_trained = shared

    # ---- defined by jobs

    def build_dataset(self, rows: Any, what: str) -> tuple[Any, Any]:
        """The tokenized dataset, and the report on its rows."""
        raise NotImplementedError

    def make_batch(self, store: Any, samples: list[int]) -> TokenBatch:
        raise NotImplementedError

    def teaches(self, store: Any, sample: int) -> bool:
        """Whether the sample has a gradient, and not only what rounding leaves of one."""
        return True

    def loss(self, model: PackedModel, batch: TokenBatch, totals: Totals) -> LossTerm:
        """This micro-batch's share of the step's loss."""
        raise NotImplementedError

    def load_model(self, device: Device) -> Loaded:
        """Load the model to train."""
        return load_policy(self.options, device, self.mesh)

    def skeleton(self) -> PackedModel:
        """The model to train as a fake model, without weights."""
        return fake_policy(self.options)

    def attach(self, loaded: Loaded, device: Device) -> None:
        """Load frozen models that score (a reference, a teacher) into `self.scorers`."""

    def prepare(self, model: PackedModel, batches: list[TokenBatch]) -> None:
        """Process all micro-batches of a step before its first gradient, for example score them with a reference."""

    def totals(self, batches: list[TokenBatch]) -> Totals:
        """Counts over these batches: the denominators of the step's means."""
        return {
            "tokens": sum(b.tokens for b in batches),
            "trained_tokens": sum(b.trained_tokens for b in batches),
            "sequences": sum(len(b.spans) for b in batches),
        }

    def finish(self, model: PackedModel, folder: Any) -> None:
        """Called after the last step, before the model is saved."""
        (folder / REWARDS).unlink(missing_ok=True)  # left by another job in the same folder

    # ---- shared by all jobs

    @property
    def samples(self) -> int:
        return len(self.store)

    def order(self) -> SampleOrder:
        options = self.options
        most = options.max_steps if options.max_steps > 0 else None
        return SampleOrder(self.samples, options.train_batch_size, options.max_epochs, options.seed, most)

    @property
    def evaluation_samples(self) -> int:
        return 0 if self.evaluation is None else len(self.evaluation)

    @property
    def data_fingerprint(self) -> str:
        return self.store.fingerprint

    def token_ids(self) -> np.ndarray:
        """Every token that occurs in the data, in order."""
        stores = [self.store] if self.evaluation is None else [self.store, self.evaluation]
        flat = [getattr(store, "sequences", store).ids for store in stores]
        seen = np.zeros(1 + max(int(ids.max()) for ids in flat), dtype=bool)
        for ids in flat:
            seen[ids] = True
        return np.flatnonzero(seen)

    def longest(self) -> int:
        """Tokens of the longest sequence in the data."""
        stores = [self.store] if self.evaluation is None else [self.store, self.evaluation]
        return max(int(getattr(store, "sequences", store).lengths.max()) for store in stores)

    def places(self, samples: list[int]) -> list[str]:
        """Places of these samples in the user's files."""
        return self._places.names(getattr(self.store, "sequences", self.store).rows[samples].tolist())

    def first_row(self) -> tuple[list[tuple[np.ndarray, np.ndarray]], dict[str, Any] | None]:
        """(ids, trained) of the first row's sequences, and the row if the job trains whole answers, all of them."""
        sequences = getattr(self.store, "sequences", self.store)
        examples = [sequences.example(i) for i in range(self.sequences_a_sample)]
        return examples, self.rows[int(sequences.rows[0])] if self.trains_answers else None

    def data_lines(self) -> list[str]:
        """The lines of the data reports."""
        reports = [self.report] if self.evaluation_report is None else [self.report, self.evaluation_report]
        return [line for report in reports for line in report.lines()]

    def describe_data(self) -> dict:
        described = dict(self.report.as_dict())
        if self.evaluation_report is not None:
            described["evaluation"] = self.evaluation_report.as_dict()
        return described

    @property
    def packs(self) -> bool:
        """Whether micro-batches are limited by tokens, not by samples."""
        return self.options.packing_samples and not self.padded

    def cut(self, store: Any, samples: list[int]) -> list[list[int]]:
        """Split samples into micro-batches."""
        lengths = [int(length) for length in self.lengths(store)[samples]]
        if self.packs:
            parts = pack(lengths, self.micro_batch_limit.of_tokens(self.token_budget()))
        else:
            parts = chunk(lengths, self.micro_batch_limit.of_samples(self.options.micro_train_batch_size))
        return [[samples[i] for i in members] for members in parts]

    def cut_all(self, store: Any, samples: list[int]) -> list[list[int]]:
        """Like `cut` for many samples, one batch of --train_batch_size at a time."""
        size = self.options.train_batch_size
        return [part for i in range(0, len(samples), size) for part in self.cut(store, samples[i : i + size])]

    def lengths(self, store: Any) -> np.ndarray:
        """Number of tokens of each sample in a packed row."""
        return store.lengths

    def token_budget(self) -> int:
        """Maximum number of tokens in a packed row."""
        options = self.options
        if options.train_max_tokens_per_gpu:
            return options.row_tokens(options.train_max_tokens_per_gpu)
        return self.sequences_a_sample * options.micro_train_batch_size * options.max_len

    def check_model(self, model: PackedModel) -> None:
        """Refuse a model that this job cannot train."""
        known = model.config.get_text_config().vocab_size
        largest = int(self.token_ids()[-1])
        if largest >= known:
            raise UserError(
                f"--pretrain {self.options.pretrain}: its tokenizer made token {largest} of the data, but the model "
                f"knows only {known} tokens; copy the model's own tokenizer there"
            )
        room, longest = learned_positions(model.inner), self.longest()
        if room is not None and longest > room:
            raise UserError(
                f"--max_len: a sample has {longest} tokens, but {type(model.inner).__name__} has learned only {room} "
                f"positions; lower --max_len to {room}"
            )
        coefficient, name = self.options.aux_loss_coef, type(model.inner).__name__
        if coefficient <= 0:
            return
        if not hasattr(model.config, "num_experts_per_tok"):
            raise UserError(f"--aux_loss_coef {coefficient}: {name} has no experts; drop it")
        if model.path == "logits":
            raise UserError(f"--aux_loss_coef {coefficient}: cannot read the routers of {name}; drop it")

    def balances_experts(self, model: PackedModel) -> bool:
        return self.options.aux_loss_coef > 0 and model.training

    def share(
        self, loss: Tensor, figures: dict[str, Tensor], out: Any, model: PackedModel, batch: TokenBatch, totals: Totals
    ) -> LossTerm:
        """The micro-batch's loss term, with the load-balancing loss if --aux_loss_coef asks for it."""
        figures = {"loss": loss.detach(), **figures}
        if self.balances_experts(model):
            balance = balance_loss_term(model, out.router_logits, batch, totals["tokens"])
            figures["aux_loss"] = balance.detach()
            loss = loss + self.options.aux_loss_coef * balance
        return LossTerm(loss, figures)


def _prompts_of(store: Any) -> Iterator[bytes]:
    sequences = getattr(store, "sequences", store)
    return beginnings(sequences.ids, sequences.offsets, sequences.trained, every=len(sequences) // len(store))


# ---- frozen models


class FrozenScorer:
    """A frozen model that scores batches: a reference or a teacher.

    With LoRA the reference is the policy with its adapters off, so there is no second copy. With `offload` the model
    stays in main memory between steps.
    """

    def __init__(
        self,
        options: TrainedModelOptions,
        loaded: Loaded | None,
        device: Device,
        mesh: Mesh,
        *,
        pretrain: str | None,
        offload: bool,
        flag: str | None = None,
    ):
        """`loaded`: the policy, which with LoRA is also the reference; `pretrain`: a model, given by `flag`, to use
        instead of the initial policy."""
        self.device = device
        self.precision = "bf16" if options.bf16 else "fp32"
        self.adapters_off = options.lora_rank > 0 and pretrain is None
        split = None
        if not self.adapters_off:
            split = mesh if is_frozen_sharded(options, mesh, offload=offload) else None
            name = pretrain or options.pretrain
            loaded = load_frozen_policy(name, options, device, flag or "--ref_pretrain", mesh=split, offload=offload)
            enable_context_parallel(loaded.model, options, mesh, flag or f"the model {name}")
        assert loaded is not None
        self.model, self.weights = loaded.model, loaded.weights
        self.is_split = split is not None
        self._placement = FrozenPlacement(device, split, offload and not self.adapters_off)
        self._placement.settle(self.model)

    @contextlib.contextmanager
    def at_work(self) -> Iterator[Policy]:
        """Move the model to the device (adapters off, if it is the policy) for scoring inside the context."""
        off = adapters_off(self.model.model) if self.adapters_off else contextlib.nullcontext()
        with off, self._placement.at_work(self.model):
            yield self.model

    def log_probs(self, batches: Iterable[TokenBatch], temperature: float) -> list[Tensor]:
        """Log-probs of the trained tokens of every batch."""
        with self.at_work() as model:
            return [model(batch, temperature=temperature).log_probs_N for batch in batches]

    def score(self, batches: list[TokenBatch]) -> None:
        """Store every sequence's log-prob in `batch.extra["reference_S"]`."""
        with self.at_work() as model:
            for batch in batches:
                batch.extra["reference_S"] = sequence_log_probs(model, batch)


def sequence_log_probs(model: Policy, batch: TokenBatch) -> Tensor:
    return sums_by_sequence(model(batch).log_probs_N, batch)


# ---- preference pairs


class PairTask(SupervisedTask):
    """A task on preference pairs, whose two answers share the prompt's tokens in a row."""

    options: RMOptions | DPOOptions
    sequences_a_sample = 2
    trains_answers = True

    def build_dataset(self, rows, what):
        return build_pair_dataset(rows, self.tokenizer, self.options, what=what)

    def make_batch(self, store: PairDataset, samples: list[int]) -> TokenBatch:
        """Sequence 2i is the chosen answer of the i-th sample, 2i + 1 the rejected one."""
        examples = [example for i in samples for example in store.pair(i)]
        shared = [borrowed for i in samples for borrowed in (0, int(store.shared[i]))]
        extra = {}
        if store.margins is not None:
            extra["margin_P"] = torch.from_numpy(store.margins[samples])
        return TokenBatch.of(examples, shared, **extra)

    def teaches(self, store: PairDataset, sample: int) -> bool:
        (chosen, _), (rejected, _) = store.pair(sample)
        return not np.array_equal(chosen, rejected)

    def lengths(self, store: PairDataset) -> np.ndarray:
        return store.lengths_sharing

    def totals(self, batches: list[TokenBatch]) -> Totals:
        totals = super().totals(batches)
        return totals | {"pairs": totals["sequences"] / 2}
