"""Mini-batches and micro-batches of an update: taken from the experience, packed by tokens, sent to the trainers.

Samples of one prompt stay together where they fit, because a row then holds their prompt once (shared-prefix
attention). Each process gets a *slice*: the tokens of all its micro-batches in row order, with columns over the sampled
tokens (advantages_N, sampled_N and others; pre-training text has tokens only). It builds the `TokenBatch`es itself, one
at a time. If a micro-batch does not fit into memory, smaller ones are sent and the call is repeated: a role that runs
out of memory has undone its partial step.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from trimtab.algos.policy_losses import chosen_by_covariance, covariances
from trimtab.config.rl_jobs import RLOptions
from trimtab.data.batches import Example, SampleOrder, TokenBatch, chunk, pack
from trimtab.data.dataset import TokenDataset
from trimtab.data.examples import build_sft_dataset
from trimtab.data.sources import load_rows
from trimtab.distributed.launcher import Group
from trimtab.distributed.process_group import deal
from trimtab.plan.workload import scoring_tokens
from trimtab.train.rl.experience import Experience, Trajectories, block_sums, joined, runs
from trimtab.train.task import Totals
from trimtab.train.update import (
    MEMORY_FLAGS,
    InsufficientMemory,
    MicroBatchLimit,
    RebuildModels,
    Result,
    retry_smaller,
)

COVARIANCE = 0xC0
"""Random stream of clip_cov."""


class AnswerBatch(TokenBatch):
    """Sampled answers after their prompts."""


class TextBatch(TokenBatch):
    """Pre-training text mixed into an update (PTX)."""


@dataclass
class Slice:
    """The micro-batches of one process, as flat tensors."""

    ids_T: Tensor  # int32
    trained_T: Tensor
    lengths_S: Tensor  # tokens of a sequence after the shared prompt
    borrowed_S: Tensor  # prompt tokens shared with the sequence before
    samples: list[int]  # number of sequences in each micro-batch
    weights: list[float]  # weight of each micro-batch: 1, or 0 for a filler
    columns: dict[str, Tensor] = field(default_factory=dict)  # over the trained tokens
    routes_TLK: Tensor | None = None  # experts to use, as `RouteArray`

    batch_class: ClassVar[type[TokenBatch]]

    def batches(self) -> Iterator[TokenBatch]:
        """The micro-batches, one after another."""
        ids, trained = self.ids_T.numpy(), self.trained_T.numpy()
        lengths, borrowed = self.lengths_S.numpy(), self.borrowed_S.numpy()
        places = zip(*(_slices(counts) for counts in (self.samples, self.tokens, self.trained)))
        for (sequences, row, among), weight in zip(places, self.weights):
            extra = {name: column[among] for name, column in self.columns.items()}
            batch = self.batch_class.of_row(ids[row], trained[row], lengths[sequences], borrowed[sequences], **extra)
            batch.weight = weight
            batch.routes_TLK = None if self.routes_TLK is None else self.routes_TLK[row]
            yield batch

    @property
    def tokens(self) -> list[int]:
        """Number of tokens in the row of each micro-batch."""
        return block_sums(self.lengths_S, torch.tensor(self.samples)).tolist()

    @property
    def trained(self) -> list[int]:
        """Number of trained tokens in each micro-batch."""
        return block_sums(self.trained_T, torch.tensor(self.tokens)).tolist()


class AnswerSlice(Slice):
    batch_class = AnswerBatch


class TextSlice(Slice):
    batch_class = TextBatch

    @classmethod
    def of(cls, passes: Sequence[Sequence[Example]], weights: list[float]) -> "TextSlice":
        examples = [example for part in passes for example in part]
        lengths_S = torch.tensor([len(ids) for ids, _ in examples])
        trained = np.concatenate([mask for _, mask in examples])
        trained[(lengths_S.cumsum(0) - lengths_S).numpy()] = False  # nothing predicts the first token
        ids_T = torch.from_numpy(np.concatenate([ids for ids, _ in examples]).astype(np.int32))
        counts = [len(part) for part in passes]
        return cls(ids_T, torch.from_numpy(trained), lengths_S, torch.zeros_like(lengths_S), counts, weights)


def _slices(counts: list[int]) -> list[slice]:
    return [slice(start, end) for start, end in itertools.pairwise(itertools.accumulate(counts, initial=0))]


def make_slice(
    experience: Trajectories,
    passes: Sequence[Sequence[int] | None],
    *columns: str,
    routes_TLK: Tensor | None = None,
    **more: Tensor,
) -> AnswerSlice:
    """The slice of one process, with these columns over sampled tokens, and `more` by name. Samples with the same
    prompt as the one before share its tokens. A micro-batch of None is a filler: with fewer samples than processes, a
    process takes part in the collectives with a sample of weight 0."""
    samples = [i for part in passes for i in part or [0]]
    counts = [len(part or [0]) for part in passes]
    chosen = torch.tensor(samples)
    prompts_S = torch.tensor(experience.prompts)[chosen]
    shares_S = torch.zeros(len(samples), dtype=torch.bool)
    shares_S[1:] = prompts_S[1:] == prompts_S[:-1]
    shares_S[torch.tensor([0, *counts[:-1]]).cumsum(0)] = False  # the first of each micro-batch
    borrowed_S = torch.where(shares_S, experience.prompt_lengths_S[chosen], 0)
    lengths_S = experience.sequence_lengths_S[chosen] - borrowed_S
    rows, drawn = runs(experience.offsets_S[chosen] + borrowed_S, lengths_S), experience.drawn_of(chosen)
    return AnswerSlice(
        joined(experience.ids_T, rows),
        joined(experience.drawn_T, rows),
        lengths_S,
        borrowed_S,
        counts,
        [0.0 if part is None else 1.0 for part in passes],
        {name: joined(c, drawn) for name, c in (more | {name: getattr(experience, name) for name in columns}).items()},
        None if routes_TLK is None else joined(routes_TLK, rows),
    )


def batches_of(slices: Sequence[Slice]) -> Iterator[TokenBatch]:
    for part in slices:
        yield from part.batches()


# ---- which samples form an optimizer step, and which a micro-batch


def mini_batches(experience: Experience, at_once: int, seed: Sequence[int]) -> list[list[int]]:
    """Split the samples into optimizer steps of `at_once` whole groups, in random order."""
    groups = np.random.default_rng(seed).permutation(experience.groups)
    steps = [groups[i : i + at_once] for i in range(0, len(groups), at_once)]
    return [experience.samples_of(sorted(step.tolist())) for step in steps]


def all_mini_batches(experience: Experience, options: RLOptions, iteration: int) -> list[list[int]]:
    """The samples of every update of an iteration, over all epochs: a pure function of the iteration's number."""
    return [
        samples
        for epoch in range(options.max_epochs)
        for samples in mini_batches(experience, options.groups_per_update, (options.seed, iteration, epoch))
    ]


def micro_batches(
    experience: Trajectories, samples: Sequence[int], *, count: int, budget: int | None
) -> list[list[int]]:
    """Split samples into micro-batches of at most `budget` tokens or, without a budget, `count` samples."""
    pieces = _pieces(experience, samples, count=count, budget=budget)
    if budget is None:
        order = sorted(pieces, key=lambda piece: -cost(experience, piece))
        passes: list[list[int]] = []
        for piece in order:
            if passes and len(passes[-1]) + len(piece) <= count:
                passes[-1] += piece
            else:
                passes.append(list(piece))
        return passes
    return packed(experience, pieces, budget)


def packed(experience: Trajectories, pieces: Sequence[Sequence[int]], budget: int) -> list[list[int]]:
    """Pack pieces into micro-batches of at most `budget` tokens without splitting a piece."""
    costs = [cost(experience, piece) for piece in pieces]
    return [[i for member in members for i in pieces[member]] for members in pack(costs, budget)]


def _pieces(experience: Trajectories, samples: Sequence[int], *, count: int, budget: int | None) -> list[list[int]]:
    """Consecutive answers to one prompt, as many as fit into one micro-batch."""
    pieces: list[list[int]] = []
    before, tokens = None, 0  # prompt and tokens of the last piece
    for i in samples:
        prompt, own, after = experience.costs[i]
        same = prompt == before
        if same and (len(pieces[-1]) < count if budget is None else tokens + after <= budget):
            pieces[-1].append(i)
            tokens += after
        else:
            pieces.append([i])
            before, tokens = prompt, own + after
    return pieces


def cost(experience: Trajectories, samples: Sequence[int]) -> int:
    """Tokens that these samples take in a row."""
    tokens, before = 0, None
    for i in samples:
        prompt, own, after = experience.costs[i]
        tokens += after + (0 if prompt == before else own)
        before = prompt
    return tokens


# ---- micro-batches sent to the processes of a role


Parts = Sequence[Sequence[Slice]]  # slices of every process, with the same number of micro-batches each


class MicroBatcher:
    """Splits samples into micro-batches, sends them to roles, and retries with smaller ones when out of memory."""

    def __init__(self, options: RLOptions, *, larger_scoring: bool = False, text: "TextMixture | None" = None):
        """`larger_scoring`: scoring may use larger micro-batches than training unless an option sets their size;
        `text`: pre-training text mixed into the policy's updates."""
        self.options, self.larger_scoring, self.text = options, larger_scoring, text
        self.limit = MicroBatchLimit()
        self._role: Group | None = None  # of the last call
        self._sent: list[tuple[int, int]] = []  # (tokens, samples) of its micro-batches

    # ---- calls to roles

    def fill(
        self,
        experience: Experience,
        column: str,
        role: Group,
        method: str,
        samples_S: Tensor | None = None,
        **shared: Any,
    ) -> None:
        """Fill a column over sampled tokens with the results of a role, for all samples or those in `samples_S`."""
        asked_S = experience.lengths_S > 0 if samples_S is None else samples_S & (experience.lengths_S > 0)
        view = experience.taught if column == "teacher_N" else experience
        routes_TLK = self.routes(experience) if column == "old_N" else None  # other models choose by themselves
        asked = asked_S.nonzero()[:, 0].tolist()
        experience.put(column, self.scored(view, asked, role, method, routes_TLK=routes_TLK, **shared))

    def routes(self, experience: Experience) -> Tensor | None:
        """The experts that the policy uses: the engine's, with --routing_replay."""
        return experience.routes_TLK if self.options.routing_replay == "on" else None

    def teacher_states(self, experience: Experience, samples: list[int], role: Group, method: str) -> Tensor:
        """The teacher's hidden states as a column [N, D] over sampled tokens; 0 for samples that are not asked for."""
        pieces = self.scored(experience.taught, samples or [0], role, method)
        shape, dtype = (len(experience.sampled_N), pieces[0][1].shape[-1]), pieces[0][1].dtype
        # numpy's zeros take no memory until they are written.
        whole = torch.from_numpy(np.zeros(shape, dtype=f"i{dtype.itemsize}")).view(dtype)
        for part, found in pieces:
            chosen = torch.tensor(part)
            for run, states in zip(experience.drawn_of(chosen), found.split(experience.lengths_S[chosen].tolist())):
                whole[run] = states
        return whole

    def scored(
        self,
        experience: Trajectories,
        asked: list[int],
        role: Group,
        method: str,
        routes_TLK: Tensor | None = None,
        **shared: Any,
    ) -> list[tuple[Sequence[int], Tensor]]:
        """The results of a role for these samples, micro-batch by micro-batch."""
        options = self.options
        count = options.micro_value_batch_size if method == "values" else options.micro_logprob_batch_size
        count = count or options.micro_rollout_batch_size
        by_tokens = self.scoring_budget() is not None

        def ask() -> list[tuple[Sequence[int], Tensor]]:
            shares = self._shares(role, experience, asked, count, self.scoring_budget())
            parts = [[make_slice(experience, share, routes_TLK=routes_TLK)] for share in shares]
            pieces: list[tuple[Sequence[int], Tensor]] = []
            for share, values in zip(shares, self.send(role, method, parts, **shared)):
                pieces += [(samples, found) for samples, found in zip(share, values) if samples]
            return pieces

        return self.until_they_fit(ask, by_tokens=by_tokens, of="scoring")

    def send(self, role: Group, method: str, parts: Parts, **shared: Any) -> list[Any]:
        slices = [found for part in parts for found in part]
        self._role, self._sent = role, [size for found in slices for size in zip(found.tokens, found.samples)]
        return role.call(method, parts, **shared)

    def until_they_fit(
        self, attempt: Callable[[], Result], *, by_tokens: bool | None = None, of: str = "training"
    ) -> Result:
        """Call `attempt`, which splits and sends; repeat with smaller micro-batches each time memory runs out."""
        if by_tokens is None:
            by_tokens = self.token_budget() is not None
        return retry_smaller(attempt, lambda why: self._shrink(why, by_tokens, of))

    def _shrink(self, why: str, by_tokens: bool, of: str) -> None:
        assert self._role is not None
        several = self._role.reinit_process_group()
        if not self.limit.halve(self._sent, by_tokens=by_tokens):
            longest = max(tokens for tokens, _ in self._sent)
            raise InsufficientMemory(
                f"a pass of one answer, {longest:,} tokens with its prompt, does not fit into memory ({why}); lower "
                f"--generate_max_len or --prompt_max_len; {MEMORY_FLAGS}"
            )
        print(f"out of memory: begun anew in passes of at most {self.limit}; one of {of} did not fit", flush=True)
        if several:
            raise RebuildModels

    # ---- updates

    def critic_update(self, critic: Group, experience: Experience, samples: list[int]) -> tuple[Parts, Totals]:
        """The slices and totals of one optimizer step of the critic."""
        columns = ["values_N", "returns_N", *(["counts_N"] if experience.branches_S is not None else [])]
        return self.parts(critic, experience, samples, *columns), totals_of(experience, samples)

    def policy_update(
        self, actor: Group, experience: Experience, samples: list[int], step: int, teacher_ND: Tensor | None = None
    ) -> tuple[Parts, Totals]:
        """The slices and totals of one optimizer step of the policy, with the pre-training text of this step."""
        options = self.options
        kl_loss = (options.use_kl_loss and experience.reference_N is not None) or experience.lacks_kl
        learnt = samples
        other_losses = kl_loss or teacher_ND is not None or options.measures_entropy
        if not other_losses and options.aux_loss_coef <= 0 and options.policy_loss_type != "kl_cov":
            # Samples with zero advantages have no gradient and are left out. One stays even if all advantages are zero:
            # an optimizer step needs a backward pass in every process.
            learnt = with_advantage(experience, samples) or samples[:1]
        wanted = {
            "old_N": options.updates_per_iteration > 1,  # with a single update, the current policy is the old one
            "reference_N": kl_loss,
            "remaining_N": experience.lacks_kl,
            "fresh_N": experience.fresh_N is not None,
            "counts_N": experience.branches_S is not None,
            "chosen_N": options.surrogate.chooses,
        }
        if options.surrogate.chooses:
            experience.chosen_N = chosen_tokens(experience, samples, options, step)
        columns = ["advantages_N", "sampled_N", *(name for name, is_wanted in wanted.items() if is_wanted)]
        more = {} if teacher_ND is None else {"teacher_ND": teacher_ND}
        if (routes_TLK := self.routes(experience)) is not None:
            more["routes_TLK"] = routes_TLK
        parts, totals = self.parts(actor, experience, learnt, *columns, **more), totals_of(experience, samples)
        totals["seen_tokens"] = max(float(experience.lengths_S[learnt].sum()), 1.0)
        totals["row_tokens"] = max(counted("tokens", *parts), 1.0)
        if experience.fresh_N is not None:
            totals["fresh_tokens"] = float(experience.fresh_N[experience.tokens_of(learnt)].sum())
        if self.text is not None:
            texts = self.text.parts(step, actor.size, self)
            totals["text_tokens"] = counted("trained", texts)
            parts = [[*answers, text] for answers, text in zip(parts, texts)]
        return parts, totals

    # ---- splitting

    def parts(
        self, role: Group, experience: Experience, samples: Sequence[int], *columns: str, **more: Tensor
    ) -> Parts:
        """The slices of an update, for each process of a role."""
        shares = self._shares(role, experience, samples, self.options.micro_train_batch_size, self.token_budget())
        return [[make_slice(experience, share, *columns, **more)] if share else [] for share in shares]

    def _shares(
        self, role: Group, experience: Trajectories, samples: Sequence[int], count: int, budget: int | None
    ) -> list[list[list[int] | None]]:
        """The samples of every micro-batch of every process."""
        if not samples:  # every process must take part in a step
            return [[None] for _ in range(role.size)]
        count = self.limit.of_samples(count)
        budget = None if budget is None else self.limit.of_tokens(budget)
        cut = micro_batches(experience, samples, count=count, budget=budget)
        return deal(cut, role.size, lambda part: cost(experience, part))

    def scoring_budget(self) -> int | None:
        """Token budget of a scoring micro-batch; None: micro-batches are limited by samples."""
        options, budget = self.options, self.options.rollout_max_tokens_per_gpu
        if budget is None and (not options.use_dynamic_batch or options.train_max_tokens_per_gpu is None):
            return None
        budget = budget or options.train_max_tokens_per_gpu
        assert budget is not None
        if self.larger_scoring and "rollout_max_tokens_per_gpu" not in options.given:
            budget = scoring_tokens(budget)
        return options.row_tokens(budget)

    def token_budget(self) -> int | None:
        """Token budget of a training micro-batch; None: micro-batches are limited by samples."""
        if not self.options.use_dynamic_batch or self.options.train_max_tokens_per_gpu is None:
            return None
        return self.limit.of_tokens(self.options.row_tokens(self.options.train_max_tokens_per_gpu))


def with_advantage(experience: Experience, samples: list[int]) -> list[int]:
    """The samples with a nonzero advantage at some token; the others have no gradient from the policy loss."""
    assert experience.advantages_N is not None
    found = block_sums(experience.advantages_N != 0, experience.lengths_S).tolist()
    return [i for i in samples if found[i]]


def chosen_tokens(experience: Experience, samples: list[int], options: RLOptions, step: int) -> Tensor:
    """The tokens that clip_cov or kl_cov treats otherwise in this update: a function of the whole step and its number,
    so that micro-batches, processes and a resume leave it as it is."""
    assert experience.old_N is not None and experience.advantages_N is not None
    places_N = experience.tokens_of(samples)
    shuffled_N = torch.from_numpy(np.random.default_rng((options.seed, COVARIANCE, step)).permutation(len(places_N)))
    found_N = covariances(experience.old_N[places_N], experience.advantages_N[places_N])
    settings = options.policy_loss_type, found_N, options.cov_ratio, options.clip_cov_range, shuffled_N
    chosen_N = torch.zeros(len(experience.old_N), dtype=torch.bool)
    chosen_N[places_N] = chosen_by_covariance(*settings)
    return chosen_N


def counted(what: str, *parts: Sequence[Slice]) -> float:
    """Sum of the property `tokens` or `trained` over all micro-batches with weight 1."""
    slices = [found for part in parts for found in part]
    return math.fsum(n * weight for found in slices for n, weight in zip(getattr(found, what), found.weights))


def totals_of(experience: Experience, samples: list[int]) -> dict[str, float]:
    """Denominators of the update's means, at least 1."""
    answers = len(experience.episodes_S[samples].unique())
    return {"tokens": max(float(experience.lengths_S[samples].sum()), 1.0), "answers": max(float(answers), 1.0)}


# ---- --pretrain_data: text trained together with the samples (PTX)


@dataclasses.dataclass(frozen=True)
class _TextOptions:
    """Options of the SFT reader for plain text: all tokens are trained, without a template."""

    input_key: str
    max_len: int
    output_key: str | None = None
    input_template: str | None = None
    apply_chat_template: bool = False
    multiturn: bool = False
    pretrain_mode: bool = True


def load_text(options: RLOptions, tokenizer: Any) -> tuple[TokenDataset, Any]:
    """The tokenized rows of --pretrain_data, and the report on them."""
    assert options.pretrain_data is not None
    rows = load_rows(
        options.pretrain_data,
        probabilities=options.pretrain_data_probs if "," in options.pretrain_data else None,
        split=options.pretrain_split,
        max_samples=options.max_samples,
        seed=options.seed,
        flag="--pretrain_data",
    )
    longest = options.prompt_max_len + options.generate_max_len
    return build_sft_dataset(rows, tokenizer, _TextOptions(options.input_key, longest), what="pre-training")


class TextMixture:
    """Pre-training text that is mixed into the policy's updates (PTX)."""

    def __init__(self, store: TokenDataset, options: RLOptions):
        self.store, self.options = store, options
        self._order = SampleOrder(len(store), options.train_batch_size, 1, options.seed)

    def parts(self, step: int, processes: int, passes: MicroBatcher) -> list[TextSlice]:
        """The text of an update for every process, with the same number of micro-batches each."""
        epoch, index = divmod(step, self._order.steps_per_epoch)
        order = dataclasses.replace(self._order, seed=self._order.seed + epoch)
        samples = order.step_samples(index)
        lengths = [int(length) for length in self.store.lengths[samples]]
        budget = passes.token_budget()
        count = passes.limit.of_samples(self.options.micro_train_batch_size)
        cut = chunk(lengths, count) if budget is None else pack(lengths, budget)
        cut_samples = [[samples[i] for i in members] for members in cut]
        shares = deal(cut_samples, processes, lambda part: int(self.store.lengths[part].sum()))
        return [self._slice(share) for share in shares]

    def _slice(self, share: list[list[int] | None]) -> TextSlice:
        examples = [[self.store.example(i) for i in part or [0]] for part in share]
        return TextSlice.of(examples, [1.0 if part else 0.0 for part in share])
