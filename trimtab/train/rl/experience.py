"""The record of one rollout: what was sampled, and what each stage of the loop adds to it.

S samples, the answers to a prompt one after another (a group, of any size); N tokens of their answers, sample after
sample. Nothing is padded, re-tokenised or derived twice: a micro-batch is cut out of these columns.
"""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from trimtab.rewards.types import RewardResult
from trimtab.rollout.types import Rollout
from trimtab.train.rl.batches import AnswerBatch

FINISHES = ("stop", "length", "abort")
# The columns that hold a list for each sample, and what is in the lists.
LISTS = {
    "prompt_ids": torch.int64,
    "response_ids": torch.int64,
    "step_tokens": torch.int64,
    "step_scores": torch.float64,
}


@dataclass
class Experience:
    rows_S: Tensor  # which row of the prompt data
    groups_S: Tensor  # which group: 0, 1, 2 and so on, in order
    prompt_ids: list[list[int]]
    response_ids: list[list[int]]
    finishes_S: Tensor  # index into FINISHES
    sampled_N: Tensor  # log-probs as they were drawn
    rewards_S: Tensor
    scores_S: Tensor  # what dynamic filtering looks at
    logs: dict[str, Tensor] = field(default_factory=dict)  # other figures of the samples, from the rewards
    # of a process reward, a list for each sample
    step_tokens: list[list[int]] | None = None  # where in the answer each step ends
    step_scores: list[list[float]] | None = None
    # what scoring adds
    old_N: Tensor | None = None  # log-probs of the policy that the updates start from
    reference_N: Tensor | None = None
    teacher_N: Tensor | None = None  # log-probs of a teacher
    values_N: Tensor | None = None
    policy_N: Tensor | None = None  # of a proposal's answers: log-probs of the policy
    twist_N: Tensor | None = None  # of a proposal's answers: its log psi
    # what shaping adds
    advantages_N: Tensor | None = None
    returns_N: Tensor | None = None

    @classmethod
    def of(cls, rows: Sequence[int], rollouts: Sequence[Rollout], result: RewardResult | None = None) -> "Experience":
        """`result`: the rewards of the same samples, if they are known."""
        experience = cls(
            torch.tensor(rows),
            torch.unique(torch.tensor([r.prompt for r in rollouts]), return_inverse=True)[1],
            [r.prompt_ids for r in rollouts],
            [r.ids for r in rollouts],
            torch.tensor([FINISHES.index(r.finish) for r in rollouts]),
            torch.from_numpy(np.concatenate([r.log_probs for r in rollouts])),
            torch.zeros(len(rows)),
            torch.zeros(len(rows)),
        )
        if result is not None:
            experience.reward(result)
        return experience

    def reward(self, result: RewardResult) -> None:
        self.rewards_S = torch.tensor(result.rewards, dtype=torch.float32)
        self.scores_S = torch.tensor(result.scores, dtype=torch.float32)
        self.logs = {name: torch.tensor(values, dtype=torch.float32) for name, values in result.logs.items()}
        if result.steps is not None:
            self.step_tokens = [[token for token, _ in steps] for steps in result.steps]
            self.step_scores = [[score for _, score in steps] for steps in result.steps]

    @classmethod
    def joined(cls, parts: Sequence["Experience"]) -> "Experience":
        """Several rollouts as one, before anything was added to them. No group is in two of them."""
        columns = {f.name: _joined([getattr(part, f.name) for part in parts]) for f in fields(cls)}
        before = itertools.accumulate((part.groups for part in parts), initial=0)
        columns["groups_S"] = torch.cat([part.groups_S + first for part, first in zip(parts, before)])
        return cls(**columns)

    def take(self, samples: Sequence[int]) -> "Experience":
        """These samples alone, before anything was added to them; those of a group are beside each other."""
        tokens = self.tokens_of(samples)
        chosen = torch.tensor(samples)
        return Experience(
            self.rows_S[chosen],
            _in_order(self.groups_S[chosen]),
            [self.prompt_ids[i] for i in samples],
            [self.response_ids[i] for i in samples],
            self.finishes_S[chosen],
            self.sampled_N[tokens],
            self.rewards_S[chosen],
            self.scores_S[chosen],
            {name: values[chosen] for name, values in self.logs.items()},
            None if self.step_tokens is None else [self.step_tokens[i] for i in samples],
            None if self.step_scores is None else [self.step_scores[i] for i in samples],
        )

    def __len__(self) -> int:
        return len(self.response_ids)

    # ---- its groups

    @property
    def groups(self) -> int:
        return int(self.groups_S[-1]) + 1 if len(self) else 0

    @cached_property
    def sizes_G(self) -> Tensor:
        return torch.bincount(self.groups_S)

    @property
    def firsts_G(self) -> Tensor:
        """The first sample of every group."""
        return self.sizes_G.cumsum(0) - self.sizes_G

    def samples_of(self, groups: Iterable[int]) -> list[int]:
        """The samples of these groups, group after group."""
        firsts, sizes = self.firsts_G.tolist(), self.sizes_G.tolist()
        return [firsts[group] + answer for group in groups for answer in range(sizes[group])]

    # ---- what a sample is worth

    @cached_property
    def answer_rewards_S(self) -> Tensor:
        """What an answer is judged by as a whole: its reward and, where its steps have rewards, their mean."""
        if self.step_scores is None:
            return self.rewards_S
        means = [sum(scores) / len(scores) if scores else 0.0 for scores in self.step_scores]
        return self.rewards_S + torch.tensor(means)

    def steps(self) -> tuple[Tensor, Tensor]:
        """Of all K steps, sample after sample: their scores, and where their last tokens lie among all tokens."""
        assert self.step_tokens is not None and self.step_scores is not None
        starts = self.starts_S.tolist()
        tokens = [start + token for start, found in zip(starts, self.step_tokens) for token in found]
        scores = [score for found in self.step_scores for score in found]
        return torch.tensor(scores, dtype=torch.float32), torch.tensor(tokens, dtype=torch.int64)

    # ---- where things lie

    @cached_property
    def lengths_S(self) -> Tensor:
        return torch.tensor([len(ids) for ids in self.response_ids])

    @cached_property
    def starts_S(self) -> Tensor:
        return self.lengths_S.cumsum(0) - self.lengths_S

    @cached_property
    def owners_N(self) -> Tensor:
        """Which sample a token belongs to."""
        return torch.repeat_interleave(torch.arange(len(self)), self.lengths_S)

    @cached_property
    def remaining_N(self) -> Tensor:
        """How many tokens of the same answer follow."""
        ends = (self.starts_S + self.lengths_S)[self.owners_N]
        return ends - 1 - torch.arange(len(self.owners_N))

    def tokens_of(self, samples: Sequence[int]) -> Tensor:
        """Where the answers' tokens of these samples lie in the columns of tokens, in their order."""
        spans = zip(self.starts_S[list(samples)].tolist(), self.lengths_S[list(samples)].tolist())
        return torch.cat([torch.arange(start, start + length) for start, length in spans])

    def batch(self, samples: Sequence[int], *columns: str) -> AnswerBatch:
        """A micro-batch with these columns of tokens beside it. Answers to one prompt share its tokens."""
        examples, shared = [], []
        for place, i in enumerate(samples):
            prompt, response = self.prompt_ids[i], self.response_ids[i]
            trained = np.zeros(len(prompt) + len(response), dtype=bool)
            trained[len(prompt) :] = True
            examples.append((np.array(prompt + response), trained))
            same = place > 0 and self.prompt_ids[samples[place - 1]] == prompt
            shared.append(len(prompt) if same else 0)
        tokens = self.tokens_of(samples)
        return AnswerBatch.of(examples, shared, **{name: getattr(self, name)[tokens] for name in columns})

    def put(self, column: str, pieces: Sequence[tuple[Sequence[int], Tensor]]) -> None:
        """Fill a column of tokens from (samples, their tokens' values)."""
        filled = torch.empty(len(self.owners_N))
        for samples, values in pieces:
            filled[self.tokens_of(samples)] = values.float().cpu()
        setattr(self, column, filled)

    # ---- on disk

    def tensors(self) -> dict[str, Tensor]:
        """Everything, as named tensors."""
        found = {f.name: getattr(self, f.name) for f in fields(self)}
        # Copies: a column may be another one under a second name, which the file format does not take.
        tensors = {name: value.clone() for name, value in found.items() if isinstance(value, Tensor)}
        tensors |= {f"logs/{name}": values.clone() for name, values in self.logs.items()}
        for name, dtype in LISTS.items():
            if found[name] is not None:
                tensors[name] = torch.tensor([item for part in found[name] for item in part], dtype=dtype)
                tensors[f"{name}_lengths"] = torch.tensor([len(part) for part in found[name]])
        return tensors

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor]) -> "Experience":
        tensors = dict(tensors)
        arguments: dict = {"logs": {}}
        for name in LISTS:
            if name in tensors:
                lengths = tensors.pop(f"{name}_lengths").tolist()
                arguments[name] = [part.tolist() for part in tensors.pop(name).split(lengths)]
        for name, value in tensors.items():
            if name.startswith("logs/"):
                arguments["logs"][name.removeprefix("logs/")] = value
            else:
                arguments[name] = value
        return cls(**arguments)


def _in_order(groups_S: Tensor) -> Tensor:
    """The same groups, numbered as they come."""
    return groups_S.unique_consecutive(return_inverse=True)[1]


def _joined(values: list):
    first = values[0]
    if isinstance(first, list):
        return [item for value in values for item in value]
    if isinstance(first, dict):
        names = dict.fromkeys(name for value in values for name in value)
        return {name: torch.cat([value[name] for value in values]) for name in names}
    return None if first is None else torch.cat(values)
