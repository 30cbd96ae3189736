"""The experience of an iteration: what was sampled, and what each stage of the loop adds to it.

S samples, those of a prompt one after another (a group, of any size), lie in flat columns over all their T tokens: a
prompt, and after it tokens of the model and, in conversations with tools or users, of the environment. Columns over the
N tokens that the model drew itself (`drawn_T`) have nothing of prompts and observations. Nothing is padded,
re-tokenized or derived twice: micro-batches are slices of these columns.

An answer is one sample, and so is an episode with an environment. Only an episode whose history was rewritten on the
way is several, its *branches*, one after another; every drawn token is in one of them as drawn. E counts answers and
episodes, each once; everything about rewards is per answer or episode. A branch may be continued after another was
begun: then the order of the columns is not the order of time, which decides which rewards and KL are still to come
(`TimeOrder`).
"""

import itertools
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from trimtab.rewards.types import RewardResult
from trimtab.rollout.episode import Episode
from trimtab.rollout.trajectory import Trajectory, flatten


@dataclass
class Trajectories:
    ids_T: Tensor  # int32
    drawn_T: Tensor
    prompt_lengths_S: Tensor
    sequence_lengths_S: Tensor  # of prompt and all that follows

    def __len__(self) -> int:
        return len(self.sequence_lengths_S)

    def prompt(self, i: int) -> list[int]:
        start = int(self.offsets_S[i])
        return self.ids_T[start : start + int(self.prompt_lengths_S[i])].tolist()

    def response(self, i: int) -> list[int]:
        """Everything after the prompt."""
        return self._response(i).tolist()

    def response_bytes(self, i: int) -> bytes:
        """The same of equal responses, and of no others."""
        return self._response(i).tobytes()

    def _response(self, i: int) -> np.ndarray:
        return self.ids_T.numpy()[self._responses[i]]

    def drawn(self, i: int) -> Tensor:
        """Which tokens of the response the model drew."""
        start, length = int(self.offsets_S[i]), int(self.sequence_lengths_S[i])
        return self.drawn_T[start + int(self.prompt_lengths_S[i]) : start + length]

    # ---- where things lie

    @cached_property
    def _responses(self) -> list[slice]:
        return runs(self.offsets_S + self.prompt_lengths_S, self.sequence_lengths_S - self.prompt_lengths_S)

    @cached_property
    def offsets_S(self) -> Tensor:
        """Where in the columns over all tokens a sequence begins."""
        return self.sequence_lengths_S.cumsum(0) - self.sequence_lengths_S

    @cached_property
    def lengths_S(self) -> Tensor:
        """How many tokens the model drew."""
        return block_sums(self.drawn_T, self.sequence_lengths_S)

    @cached_property
    def starts_S(self) -> Tensor:
        """Where in the columns over drawn tokens those of a sequence begin."""
        return self.lengths_S.cumsum(0) - self.lengths_S

    @cached_property
    def owners_N(self) -> Tensor:
        """Which sample a drawn token belongs to."""
        return torch.repeat_interleave(torch.arange(len(self)), self.lengths_S)

    @cached_property
    def remaining_N(self) -> Tensor:
        """How many drawn tokens of the same sample follow."""
        last_N = torch.repeat_interleave(self.starts_S + self.lengths_S - 1, self.lengths_S)
        return last_N.sub_(torch.arange(len(last_N)))

    def tokens_of(self, samples: Sequence[int]) -> Tensor:
        """Where the drawn tokens of these samples lie in the columns over them, in the samples' order."""
        places = torch.arange(len(self.owners_N))
        return joined(places, self.drawn_of(torch.as_tensor(samples, dtype=torch.int64)))

    def drawn_of(self, samples: Tensor) -> list[slice]:
        """The same places, as runs."""
        return runs(self.starts_S[samples], self.lengths_S[samples])

    # ---- how they are cut into passes

    @cached_property
    def prompts(self) -> list[int]:
        """A number of each sample's prompt, the same for equal prompts."""
        known: dict[bytes, int] = {}
        ids = self.ids_T.numpy()
        spans = zip(self.offsets_S.tolist(), self.prompt_lengths_S.tolist())
        return [known.setdefault(ids[start : start + length].tobytes(), len(known)) for start, length in spans]

    @cached_property
    def costs(self) -> list[tuple[int, int, int]]:
        """Of each sample: its prompt's number, the prompt's tokens, and the response's."""
        after = (self.sequence_lengths_S - self.prompt_lengths_S).tolist()
        return list(zip(self.prompts, self.prompt_lengths_S.tolist(), after))


def block_sums(values: Tensor, lengths_S: Tensor) -> Tensor:
    """Integer sums over consecutive blocks of the given lengths; 0 for an empty block."""
    found_S, some_S = torch.zeros_like(lengths_S), lengths_S > 0
    starts = (lengths_S.cumsum(0) - lengths_S)[some_S].numpy()
    if len(starts):
        found_S[some_S] = torch.from_numpy(np.add.reduceat(values.numpy(), starts, dtype=np.int64))
    return found_S


def runs(starts_S: Tensor, lengths_S: Tensor) -> list[slice]:
    return [slice(*ends) for ends in zip(starts_S.tolist(), (starts_S + lengths_S).tolist())]


def joined(column: Tensor, runs: list[slice]) -> Tensor:
    """These runs of a column, one after another."""
    values = column.numpy()
    return torch.from_numpy(np.concatenate([values[run] for run in runs])) if runs else column[:0]


# ---- one rollout


FINISHES = ("stop", "length", "abort", "context", "turns", "truncated", "failed")
# Those of answers and episodes that something outside them has cut off, by their places above.
CUT_OFF = [FINISHES.index(finish) for finish in ("length", "context", "turns", "truncated")]
# The columns that hold a list for each sample, and what is in the lists.
LISTS = {"step_tokens": torch.int64, "step_scores": torch.float64}


@dataclass
class Experience(Trajectories):
    rows_S: Tensor  # which row of the prompt data
    groups_S: Tensor  # which group: 0, 1, 2 and so on, in order
    finishes_S: Tensor  # index into FINISHES
    sampled_N: Tensor  # log-probs as they were drawn
    rewards_S: Tensor
    scores_S: Tensor  # what dynamic filtering looks at
    logs: dict[str, Tensor] = field(default_factory=dict)  # other figures of the samples, from the rewards
    versions_N: Tensor | None = None  # int32: of the weights that drew each token
    branches_S: Tensor | None = None  # which branch of its episode: 0, 1, 2 and so on; None: all are the only ones
    episodes: list[Episode] | None = None  # of an environment, for each sample: who said what; branches share it
    # of a process reward, a list for each sample
    step_tokens: list[list[int]] | None = None  # which of the sample's drawn tokens ends each step
    step_scores: list[list[float]] | None = None
    # what scoring adds
    old_N: Tensor | None = None  # log-probs of the policy that the updates start from
    fresh_N: Tensor | None = None  # where others may be older: 1 if that policy drew the token itself, else 0
    reference_N: Tensor | None = None
    teacher_N: Tensor | None = None  # log-probs of a teacher
    values_N: Tensor | None = None
    after_N: Tensor | None = None  # values after each token of samples that were cut off, 0 in the others
    policy_N: Tensor | None = None  # of a proposal's answers: log-probs of the policy
    twist_N: Tensor | None = None  # of a proposal's answers: its log psi
    # what shaping adds
    advantages_N: Tensor | None = None
    returns_N: Tensor | None = None

    @classmethod
    def of(
        cls, rows: Sequence[int], rollouts: Sequence[Trajectory], result: RewardResult | None = None
    ) -> "Experience":
        """Samples of one call of an engine; `result`: their rewards, if they are known. Where they are not in the order
        of their prompts, `take` puts them in it."""
        flat = flatten(rollouts, prompts=True)
        prompt_lengths_S = torch.tensor([len(r.prompt_ids) for r in rollouts])
        experience = cls(
            torch.from_numpy(flat.tokens_T),
            torch.from_numpy(flat.drawn_T),
            prompt_lengths_S,
            prompt_lengths_S + torch.tensor([len(r.tokens) for r in rollouts]),
            torch.tensor(rows),
            torch.unique(torch.tensor([r.prompt for r in rollouts]), return_inverse=True)[1],
            torch.tensor([FINISHES.index(r.finish) for r in rollouts]),
            torch.from_numpy(flat.log_probs_N),
            torch.zeros(len(rows)),
            torch.zeros(len(rows)),
        )
        drawn_tokens = int(np.count_nonzero(experience.drawn_T.numpy()))  # which torch counts in fifty times as long
        assert len(experience.sampled_N) == drawn_tokens, "a log-prob for every token that was drawn"
        if flat.versions_N is not None:
            experience.versions_N = torch.from_numpy(flat.versions_N)
            assert len(experience.versions_N) == len(experience.sampled_N), "a version for every token that was drawn"
        if any(r.branch for r in rollouts):
            pairs = itertools.pairwise((r.prompt, r.sample, r.branch) for r in rollouts)
            assert rollouts[0].branch == 0 and all(
                later[2] == 0 or later == (*earlier[:2], earlier[2] + 1) for earlier, later in pairs
            ), "the branches of an episode one after another"
            experience.branches_S = torch.tensor([r.branch for r in rollouts])
        episodes = [r.episode for r in rollouts if r.episode is not None]
        if episodes:
            assert len(episodes) == len(rollouts), "a record for every sample"
            experience.episodes = episodes
        if result is not None:
            experience.reward(result)
        return experience

    def reward(self, result: RewardResult) -> None:
        """One entry a sample; an episode of several branches is judged by the last, where it ends."""
        judged = self.lasts_E[self.episodes_S]
        self.rewards_S = torch.tensor(result.rewards, dtype=torch.float32)[judged]
        self.scores_S = torch.tensor(result.scores, dtype=torch.float32)[judged]
        self.logs = {name: torch.tensor(values, dtype=torch.float32)[judged] for name, values in result.logs.items()}
        if result.steps is not None:
            # They come as places in the response. A step that ends in what the world said ends for the model at the
            # last token that it drew before; one that it ended in an earlier branch is counted there.
            self.step_tokens, self.step_scores = [], []
            branches = [0] * len(self) if self.branches_S is None else self.branches_S.tolist()
            for i, (steps, branch) in enumerate(zip(result.steps, branches)):
                drawn = self.drawn(i)
                among = (drawn.cumsum(0) - 1).clamp(min=-1 if branch or not drawn.any() else 0).tolist()
                own = [(among[token], score) for token, score in steps if among[token] >= 0]
                self.step_tokens.append([token for token, _ in own])
                self.step_scores.append([score for _, score in own])

    @classmethod
    def joined(cls, parts: Sequence["Experience"]) -> "Experience":
        """Several rollouts as one, before anything was added to them. No group is in two of them. A figure that the
        rewards gave in some of them only is NaN in the others."""
        if len(parts) == 1:
            return replace(parts[0])  # what is added to it is not added to the part
        columns: dict[str, Any] = {f.name: [getattr(part, f.name) for part in parts] for f in fields(cls)}
        logs = columns.pop("logs")
        lists = {name: columns.pop(name) for name in LISTS}
        episodes, branches = columns.pop("episodes"), columns.pop("branches_S")
        columns = {name: None if found[0] is None else torch.cat(found) for name, found in columns.items()}
        names = dict.fromkeys(name for found in logs for name in found)
        nothing = [torch.full((len(part),), torch.nan) for part in parts]
        columns["logs"] = {n: torch.cat([own.get(n, none) for own, none in zip(logs, nothing)]) for n in names}
        for name, found in lists.items():
            if any(own is not None for own in found):
                columns[name] = [x for own, part in zip(found, parts) for x in own or [[] for _ in range(len(part))]]
        if all(own is not None for own in episodes):
            columns["episodes"] = [episode for own in episodes for episode in own]
        if any(own is not None for own in branches):
            zeros = (torch.zeros(len(part), dtype=torch.int64) for part in parts)
            columns["branches_S"] = torch.cat([none if own is None else own for own, none in zip(branches, zeros)])
        before = itertools.accumulate((part.groups for part in parts), initial=0)
        columns["groups_S"] = torch.cat([part.groups_S + first for part, first in zip(parts, before)])
        return cls(**columns)

    def take(self, samples: Sequence[int]) -> "Experience":
        """These samples alone; those of a group are beside each other, and no episode is without its first branch."""
        chosen = torch.as_tensor(samples, dtype=torch.int64)
        runs_of = {"_T": runs(self.offsets_S[chosen], self.sequence_lengths_S[chosen]), "_N": self.drawn_of(chosen)}
        taken: dict[str, Any] = {"logs": {name: values[chosen] for name, values in self.logs.items()}}
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(value, Tensor):
                places = runs_of.get(f.name[-2:])
                taken[f.name] = value[chosen] if places is None else joined(value, places)
            elif isinstance(value, list):
                taken[f.name] = [value[i] for i in samples]
        taken["groups_S"] = _numbered(taken["groups_S"])
        return Experience(**taken)

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

    # ---- its answers and episodes

    @cached_property
    def episodes_S(self) -> Tensor:
        """Which answer or episode a sample is, or is a branch of: 0, 1, 2 and so on, in order."""
        if self.branches_S is None:
            return torch.arange(len(self))
        return (self.branches_S == 0).cumsum(0) - 1

    @cached_property
    def firsts_E(self) -> Tensor:
        """The first branch of each."""
        return torch.arange(len(self)) if self.branches_S is None else (self.branches_S == 0).nonzero()[:, 0]

    @cached_property
    def lasts_E(self) -> Tensor:
        """The branch in which each ends."""
        return torch.cat([self.firsts_E[1:] - 1, torch.tensor([len(self) - 1])]) if len(self) else self.firsts_E

    @property
    def cut_off_S(self) -> Tensor:
        """Which samples ended because of a limit."""
        return torch.isin(self.finishes_S, torch.tensor(CUT_OFF))

    @property
    def groups_E(self) -> Tensor:
        return self.groups_S[self.firsts_E]

    @property
    def answers_G(self) -> Tensor:
        """How many each group has."""
        return torch.bincount(self.groups_E)

    @property
    def counts_N(self) -> Tensor:
        """How many tokens the model drew in each token's answer or episode."""
        return self.lengths_E[self.episodes_S[self.owners_N]]

    @cached_property
    def lengths_E(self) -> Tensor:
        """How many tokens the model drew, in all branches."""
        return self.lengths_S.new_zeros(len(self.firsts_E)).index_add(0, self.episodes_S, self.lengths_S)

    @cached_property
    def drawn_E(self) -> Tensor:
        """In which of them the model drew a token. The others cannot be learnt from: the policy had no part in their
        rewards, so nothing is compared with these."""
        return self.lengths_E > 0

    # ---- what a sample is worth

    @property
    def lacks_kl(self) -> bool:
        """Its advantages are without the KL to the reference, since the policy's log-probs come in the update."""
        return self.reference_N is not None and self.old_N is None

    @cached_property
    def answer_rewards_S(self) -> Tensor:
        """What an answer is judged by as a whole: its reward and, where its steps have rewards, their mean."""
        if self.step_scores is None:
            return self.rewards_S
        found: list[list[float]] = [[] for _ in self.firsts_E]
        for episode, scores in zip(self.episodes_S.tolist(), self.step_scores):
            found[episode] += scores
        means_E = torch.tensor([sum(scores) / len(scores) if scores else 0.0 for scores in found])
        return self.rewards_S + means_E[self.episodes_S]

    def steps(self) -> tuple[Tensor, Tensor]:
        """Of all K steps, sample after sample: their scores, and where their last tokens lie among all tokens."""
        assert self.step_tokens is not None and self.step_scores is not None
        starts = self.starts_S.tolist()
        tokens = [start + token for start, found in zip(starts, self.step_tokens) for token in found]
        scores = [score for found in self.step_scores for score in found]
        return torch.tensor(scores, dtype=torch.float32), torch.tensor(tokens, dtype=torch.int64)

    def put(self, column: str, pieces: Sequence[tuple[Sequence[int], Tensor]]) -> None:
        """Fill a column of tokens from (samples, their tokens' values); it is 0 in samples that are in no piece."""
        filled = np.zeros(len(self.sampled_N), dtype=np.float32)
        found = torch.cat([torch.zeros(0), *(values.float().cpu() for _, values in pieces)]).numpy()
        begin = 0
        for run in self.drawn_of(torch.tensor([i for samples, _ in pieces for i in samples], dtype=torch.int64)):
            end = begin + run.stop - run.start
            filled[run] = found[begin:end]
            begin = end
        assert begin == len(found), "a value for every token"
        setattr(self, column, torch.from_numpy(filled))

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
        if self.episodes is not None:
            plain = json.dumps([self.episodes[i].plain() for i in self.firsts_E])
            tensors["episodes"] = torch.frombuffer(bytearray(plain.encode()), dtype=torch.uint8)
        return tensors

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor]) -> "Experience":
        tensors = dict(tensors)
        versions_S = tensors.pop("versions_S", None)  # earlier recordings have one for each sample
        episodes = tensors.pop("episodes", None)
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
        experience = cls(**arguments)
        if versions_S is not None:
            experience.versions_N = versions_S[experience.owners_N].int()
        if episodes is not None:
            found = [Episode.of_plain(plain) for plain in json.loads(episodes.numpy().tobytes())]
            experience.episodes = [found[episode] for episode in experience.episodes_S]
        return experience


def is_earlier(names: Iterable[str]) -> bool:
    """Whether tensors of these names were written by a version that kept lists of tokens."""
    return "response_ids" in names


def _numbered(groups_S: Tensor) -> Tensor:
    """The same groups, numbered as they come."""
    return groups_S.unique_consecutive(return_inverse=True)[1]


# ---- turns of episodes in the order of time


class TimeOrder:
    """The columns over drawn tokens as time sees them: episode after episode, whatever branch a token is in."""

    def __init__(self, experience: Experience):
        self.experience = experience
        self.order_N = None if experience.branches_S is None else _order(experience)

    def sorted(self, column_N: Tensor) -> Tensor:
        return column_N if self.order_N is None else column_N[self.order_N]

    def back(self, sorted_N: Tensor) -> Tensor:
        """A column of the experience from one that was sorted."""
        if self.order_N is None:
            return sorted_N
        return torch.empty_like(sorted_N).index_copy(0, self.order_N, sorted_N)

    @cached_property
    def places_N(self) -> Tensor:
        """Where each token is when they are sorted."""
        return self.back(torch.arange(len(self.experience.sampled_N)))

    # ---- of the sorted tokens

    @property
    def owners_N(self) -> Tensor:
        """Which episode each belongs to."""
        experience = self.experience
        if self.order_N is None:  # every sample is an answer
            return experience.owners_N
        return self.sorted(experience.episodes_S[experience.owners_N])

    @property
    def remaining_N(self) -> Tensor:
        """How many of the same episode follow."""
        if self.order_N is None:
            return self.experience.remaining_N
        lengths_E = self.experience.lengths_E
        return torch.repeat_interleave(lengths_E.cumsum(0) - 1, lengths_E) - torch.arange(len(self.order_N))


def _order(experience: Experience) -> Tensor:
    """The drawn tokens in the order of time. Where no record says it, branches were drawn one after another."""
    if experience.episodes is None:
        return torch.arange(len(experience.sampled_N))
    turns = TurnLayout.of(experience)
    places_N = torch.arange(len(experience.sampled_N))
    order_N = joined(places_N, runs(turns.starts_K, turns.tokens_K + 1 - turns.starts_K))
    assert len(order_N) == len(places_N), "every drawn token is one of a turn"
    return order_N


@dataclass
class TurnLayout:
    """The K turns of the model in all episodes, in the order of time."""

    rewards_K: Tensor
    episodes_K: Tensor  # which answer or episode
    starts_K: Tensor  # its first token in the columns over drawn tokens
    tokens_K: Tensor  # its last one

    @classmethod
    def of(cls, experience: Experience) -> "TurnLayout":
        assert experience.episodes is not None
        behind_prompt = (experience.offsets_S + experience.prompt_lengths_S).tolist()
        found: list[tuple[float, int, int, int]] = []
        for episode, first in enumerate(experience.firsts_E.tolist()):
            for turn in experience.episodes[first].turns:
                begin = behind_prompt[first + turn.branch]
                found.append((turn.reward, episode, begin + turn.start, begin + turn.end))
        rewards, episodes, starts, ends = zip(*found) if found else ((), (), (), ())
        drawn_before = F.pad(experience.drawn_T.cumsum(0), (1, 0))
        starts_K, ends_K = (drawn_before[torch.tensor(places, dtype=torch.int64)] for places in (starts, ends))
        assert bool((starts_K < ends_K).all()), "a turn has drawn something"
        episodes_K = torch.tensor(episodes, dtype=torch.int64)
        return cls(torch.tensor(rewards, dtype=torch.float32), episodes_K, starts_K, ends_K - 1)
