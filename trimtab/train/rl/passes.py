"""An experience cut into passes for the roles, in however many processes they work.

Where passes do not fit into memory they are made smaller and the call is made again: a role that runs out of memory
has taken back what it began.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from trimtab.config.jobs import RLOptions
from trimtab.distributed.launcher import Group
from trimtab.distributed.process_group import deal
from trimtab.plan.workload import scoring_tokens
from trimtab.train.pass_limit import FLAGS, BeginAnew, NoRoom, PassLimit, Result, until_it_fits
from trimtab.train.rl.batches import Slice
from trimtab.train.rl.cut import cost, halves, micro_batches
from trimtab.train.rl.experience import Experience

Parts = Sequence[Sequence[Slice]]  # of every process, with as many passes for each


class Passes:
    def __init__(self, options: RLOptions, *, larger_scoring: bool = False):
        """`larger_scoring`: passes of scoring may be larger than those of training where nobody said how large."""
        self.options, self.larger_scoring = options, larger_scoring
        self.limit = PassLimit()
        self._role: Group | None = None  # of the last call
        self._sent: list[tuple[int, int]] = []  # (tokens, samples) of its passes

    # ---- what a role is asked

    def fill(
        self,
        experience: Experience,
        column: str,
        role: Group,
        method: str,
        samples_S: Tensor | None = None,
        **shared: Any,
    ) -> None:
        """A column of tokens from what a role says of every sample, or of those that `samples_S` marks."""
        options = self.options
        count = options.micro_value_batch_size if method == "values" else options.micro_logprob_batch_size
        count = count or options.micro_rollout_batch_size
        by_tokens = self.scoring_budget() is not None

        def ask() -> None:
            asked_S = experience.lengths_S > 0 if samples_S is None else samples_S & (experience.lengths_S > 0)
            asked = asked_S.nonzero()[:, 0].tolist()
            shares = self._shares(role, experience, asked, count, self.scoring_budget())
            parts = [[experience.slice(share)] for share in shares]
            pieces = []
            for share, values in zip(shares, self.send(role, method, parts, **shared)):
                pieces += [(samples, found) for samples, found in zip(share, values) if samples]
            experience.put(column, pieces)

        self.until_they_fit(ask, by_tokens=by_tokens, of="scoring")

    def send(self, role: Group, method: str, parts: Parts, **shared: Any) -> list[Any]:
        slices = [found for part in parts for found in part]
        self._role, self._sent = role, [size for found in slices for size in zip(found.tokens, found.samples)]
        return role.call(method, parts, **shared)

    def until_they_fit(
        self, attempt: Callable[[], Result], *, by_tokens: bool | None = None, of: str = "training"
    ) -> Result:
        """The result of an attempt that cuts and sends; again with smaller passes each time memory was short."""
        if by_tokens is None:
            by_tokens = self.token_budget() is not None
        return until_it_fits(attempt, lambda why: self._shrink(why, by_tokens, of))

    def _shrink(self, why: str, by_tokens: bool, of: str) -> None:
        assert self._role is not None
        several = self._role.reinit_process_group()
        if not self.limit.halve(self._sent, by_tokens=by_tokens):
            longest = max(tokens for tokens, _ in self._sent)
            raise NoRoom(
                f"a pass of one answer, {longest:,} tokens with its prompt, does not fit into memory ({why}); lower "
                f"--generate_max_len or --prompt_max_len; {FLAGS}"
            )
        print(f"out of memory: begun anew in passes of at most {self.limit}; one of {of} did not fit", flush=True)
        if several:
            raise BeginAnew

    # ---- how it is cut

    def parts(self, role: Group, experience: Experience, samples: Sequence[int], *columns: str) -> Parts:
        """An update's slices."""
        shares = self._shares(role, experience, samples, self.options.micro_train_batch_size, self.token_budget())
        return [[experience.slice(share, *columns)] if share else [] for share in shares]

    def _shares(
        self, role: Group, experience: Experience, samples: Sequence[int], count: int, budget: int | None
    ) -> list[list[list[int] | None]]:
        """The samples of every pass of every process."""
        if not samples:  # every process takes part in a step
            return [[None] for _ in range(role.size)]
        count = self.limit.of_samples(count)
        budget = None if budget is None else self.limit.of_tokens(budget)
        cut = micro_batches(experience, samples, count=count, budget=budget)
        return deal(cut, role.size, lambda part: cost(experience, part), halves)

    def scoring_budget(self) -> int | None:
        """Of a pass of scoring, by what the options say; None: passes have a number of samples."""
        options, budget = self.options, self.options.rollout_max_tokens_per_gpu
        if budget is None and (not options.use_dynamic_batch or options.train_max_tokens_per_gpu is None):
            return None
        budget = budget or options.train_max_tokens_per_gpu
        assert budget is not None
        if self.larger_scoring and "rollout_max_tokens_per_gpu" not in options.given:
            budget = scoring_tokens(budget)
        return options.row_tokens(budget)

    def token_budget(self) -> int | None:
        """Of a pass of an update; None: passes have a number of samples."""
        if not self.options.use_dynamic_batch or self.options.train_max_tokens_per_gpu is None:
            return None
        return self.limit.of_tokens(self.options.row_tokens(self.options.train_max_tokens_per_gpu))


def counted(what: str, *parts: Sequence[Slice]) -> float:
    """`tokens` or `trained` ones of all passes that count for something."""
    slices = [found for part in parts for found in part]
    return math.fsum(n * weight for found in slices for n, weight in zip(getattr(found, what), found.weights))


def totals_of(experience: Experience, samples: list[int]) -> dict[str, float]:
    """What means are over; of an update of nothing, 1."""
    answers = len(experience.episodes_S[samples].unique())
    return {"tokens": max(float(experience.lengths_S[samples].sum()), 1.0), "answers": max(float(answers), 1.0)}
