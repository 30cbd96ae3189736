"""The experience of an iteration: the sampled trajectories and the columns that each stage of the loop adds.

S samples, ordered by prompt (the samples of a prompt are a group, of any size), are stored in flat columns over all
their T tokens: the prompt, then tokens of the model and, in conversations with tools or users, of the environment.
Columns over the N tokens that the model sampled (`drawn_T`) leave out prompts and observations. Nothing is padded,
re-tokenized or derived twice: micro-batches are slices of these columns.

An answer is one sample, and so is an episode with an environment. Only an episode whose history was rewritten has
several samples, its *branches*, one after another; every sampled token is in exactly one of them. E counts answers and
episodes, each once; rewards are per answer or episode. A branch may be continued after another was begun. The columns
are then not in the order of time, which decides which rewards and KL terms lie in a token's future (`TimeOrder`).
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
from trimtab.rollout.episode import EpisodeRecord
from trimtab.rollout.trajectory import Trajectory, fit_routes, flatten


@dataclass
class Trajectories:
    """Tokens of S samples in flat columns, and where each sample lies in them."""

    ids_T: Tensor  # int32
    drawn_T: Tensor
    prompt_lengths_S: Tensor
    sequence_lengths_S: Tensor  # prompt and response

    def __len__(self) -> int:
        return len(self.sequence_lengths_S)

    def prompt(self, i: int) -> list[int]:
        start = int(self.offsets_S[i])
        return self.ids_T[start : start + int(self.prompt_lengths_S[i])].tolist()

    def response(self, i: int) -> list[int]:
        """Everything after the prompt."""
        return self._response(i).tolist()

    def response_bytes(self, i: int) -> bytes:
        """The response's token ids as bytes: a key that is equal exactly for equal responses."""
        return self._response(i).tobytes()

    def _response(self, i: int) -> np.ndarray:
        return self.ids_T.numpy()[self._responses[i]]

    def drawn(self, i: int) -> Tensor:
        """Which tokens of the response the model sampled."""
        start, length = int(self.offsets_S[i]), int(self.sequence_lengths_S[i])
        return self.drawn_T[start + int(self.prompt_lengths_S[i]) : start + length]

    # ---- offsets

    @cached_property
    def _responses(self) -> list[slice]:
        return runs(self.offsets_S + self.prompt_lengths_S, self.sequence_lengths_S - self.prompt_lengths_S)

    @cached_property
    def offsets_S(self) -> Tensor:
        """Start of each sequence in the columns over all tokens."""
        return self.sequence_lengths_S.cumsum(0) - self.sequence_lengths_S

    @cached_property
    def lengths_S(self) -> Tensor:
        """Number of tokens that the model sampled."""
        return block_sums(self.drawn_T, self.sequence_lengths_S)

    @cached_property
    def starts_S(self) -> Tensor:
        """Start of each sequence in the columns over sampled tokens."""
        return self.lengths_S.cumsum(0) - self.lengths_S

    @cached_property
    def owners_N(self) -> Tensor:
        """The sample of each sampled token."""
        return torch.repeat_interleave(torch.arange(len(self)), self.lengths_S)

    @cached_property
    def remaining_N(self) -> Tensor:
        """Number of later sampled tokens in the same sample."""
        last_N = torch.repeat_interleave(self.starts_S + self.lengths_S - 1, self.lengths_S)
        return last_N.sub_(torch.arange(len(last_N)))

    def tokens_of(self, samples: Sequence[int]) -> Tensor:
        """Indices of these samples' tokens in the columns over sampled tokens, in the samples' order."""
        places = torch.arange(len(self.owners_N))
        return joined(places, self.drawn_of(torch.as_tensor(samples, dtype=torch.int64)))

    def drawn_of(self, samples: Tensor) -> list[slice]:
        """The same indices as slices."""
        return runs(self.starts_S[samples], self.lengths_S[samples])

    # ---- for micro-batches

    @cached_property
    def prompts(self) -> list[int]:
        """A number for each sample's prompt, the same for equal prompts."""
        known: dict[bytes, int] = {}
        ids = self.ids_T.numpy()
        spans = zip(self.offsets_S.tolist(), self.prompt_lengths_S.tolist())
        return [known.setdefault(ids[start : start + length].tobytes(), len(known)) for start, length in spans]

    @cached_property
    def costs(self) -> list[tuple[int, int, int]]:
        """For each sample: the number of its prompt, the prompt's length and the response's length."""
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
    """Concatenate these slices of a column."""
    if column.dtype == torch.bfloat16:  # which numpy lacks
        return joined(column.view(torch.int16), runs).view(torch.bfloat16)
    values = column.numpy()
    return torch.from_numpy(np.concatenate([values[run] for run in runs])) if runs else column[:0]


# ---- one rollout


FINISHES = ("stop", "length", "abort", "context", "turns", "truncated", "failed")
# Indices of the finish reasons of answers and episodes that a limit cut off.
CUT_OFF = [FINISHES.index(finish) for finish in ("length", "context", "turns", "truncated")]
# Columns that hold a list for each sample, and the dtype of its items on disk.
LISTS = {"step_tokens": torch.int64, "step_scores": torch.float64, "teacher_prompts": torch.int64}


@dataclass
class Experience(Trajectories):
    rows_S: Tensor  # which row of the prompt data
    groups_S: Tensor  # which group: 0, 1, 2 and so on, in order
    finishes_S: Tensor  # index into FINISHES
    sampled_N: Tensor  # log-probs under the engine at sampling time
    rewards_S: Tensor
    scores_S: Tensor  # used by dynamic filtering and evaluation
    logs: dict[str, Tensor] = field(default_factory=dict)  # further values per sample that rewards return
    versions_N: Tensor | None = None  # int32: policy version that sampled each token
    routes_TLK: Tensor | None = None  # experts of every layer, as `RouteArray`; None: not known of any token
    branches_S: Tensor | None = None  # index of the branch in its episode; None: every sample is a whole answer
    episodes: list[EpisodeRecord] | None = None  # record of each sample's episode; branches share it
    # process rewards: a list for each sample
    step_tokens: list[list[int]] | None = None  # index among the sample's sampled tokens at which each step ends
    step_scores: list[list[float]] | None = None
    # added by scoring
    teacher_prompts: list[list[int]] | None = None  # what the teacher reads before each answer; []: the same prompt
    old_N: Tensor | None = None  # log-probs of the policy before the iteration's updates
    fresh_N: Tensor | None = None  # asynchronous runs: 1 if that policy sampled the token itself, 0 if an older one did
    reference_N: Tensor | None = None
    teacher_N: Tensor | None = None  # log-probs of a teacher
    values_N: Tensor | None = None
    after_N: Tensor | None = None  # values after each token of samples that were cut off, 0 in the others
    policy_N: Tensor | None = None  # for a proposal's samples: log-probs of the policy
    twist_N: Tensor | None = None  # for a proposal's samples: its log psi
    # added by compute_advantages
    advantages_N: Tensor | None = None
    returns_N: Tensor | None = None
    chosen_N: Tensor | None = None  # tokens of the current update that clip_cov or kl_cov chose

    @classmethod
    def of(
        cls, rows: Sequence[int], rollouts: Sequence[Trajectory], result: RewardResult | None = None
    ) -> "Experience":
        """Experience from the samples of one engine call; `result`: their rewards, if known.

        Samples that are not ordered by prompt must be reordered with `take`.
        """
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
        drawn_tokens = int(np.count_nonzero(experience.drawn_T.numpy()))  # torch's count takes fifty times as long
        assert len(experience.sampled_N) == drawn_tokens, "a log-prob for every sampled token"
        if flat.versions_N is not None:
            experience.versions_N = torch.from_numpy(flat.versions_N)
            assert len(experience.versions_N) == len(experience.sampled_N), "a version for every sampled token"
        if flat.routes_TLK is not None:
            experience.routes_TLK = torch.from_numpy(flat.routes_TLK)
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
        """Set the rewards, one entry a sample; an episode of several branches gets the reward of its last one."""
        judged = self.lasts_E[self.episodes_S]
        self.rewards_S = torch.tensor(result.rewards, dtype=torch.float32)[judged]
        self.scores_S = torch.tensor(result.scores, dtype=torch.float32)[judged]
        self.logs = {name: torch.tensor(values, dtype=torch.float32)[judged] for name, values in result.logs.items()}
        if result.steps is not None:
            # Step ends are positions in the response. A step that ends in an observation counts at the last sampled
            # token before it; a step that ended in an earlier branch counts there.
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
        """Concatenate experiences to which no stage has added anything. Each group is in one of them only. A log value
        missing in some parts becomes NaN there."""
        if len(parts) == 1:
            return replace(parts[0])  # a copy: columns added later must not appear in the part
        columns: dict[str, Any] = {f.name: [getattr(part, f.name) for part in parts] for f in fields(cls)}
        logs = columns.pop("logs")
        lists = {name: columns.pop(name) for name in LISTS}
        episodes, branches = columns.pop("episodes"), columns.pop("branches_S")
        routes = columns.pop("routes_TLK")
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
        if known := [own for own in routes if own is not None]:
            empty = known[0].numpy()[:0]
            fitted = (
                fit_routes(empty if own is None else own.numpy(), len(part.ids_T)) for own, part in zip(routes, parts)
            )
            columns["routes_TLK"] = torch.from_numpy(np.concatenate(list(fitted)))
        before = itertools.accumulate((part.groups for part in parts), initial=0)
        columns["groups_S"] = torch.cat([part.groups_S + first for part, first in zip(parts, before)])
        return cls(**columns)

    def take(self, samples: Sequence[int]) -> "Experience":
        """An experience of these samples only. A group's samples must be adjacent, and episodes need their first
        branch."""
        chosen = torch.as_tensor(samples, dtype=torch.int64)
        runs_of = {"T": runs(self.offsets_S[chosen], self.sequence_lengths_S[chosen]), "N": self.drawn_of(chosen)}
        taken: dict[str, Any] = {"logs": {name: values[chosen] for name, values in self.logs.items()}}
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(value, Tensor):
                places = runs_of.get(f.name.rpartition("_")[2][0])  # the first axis
                taken[f.name] = value[chosen] if places is None else joined(value, places)
            elif isinstance(value, list):
                taken[f.name] = [value[i] for i in samples]
        taken["groups_S"] = _numbered(taken["groups_S"])
        return Experience(**taken)

    # ---- groups

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

    # ---- answers and episodes

    @cached_property
    def episodes_S(self) -> Tensor:
        """Index of the answer or episode that each sample is, or is a branch of."""
        if self.branches_S is None:
            return torch.arange(len(self))
        return (self.branches_S == 0).cumsum(0) - 1

    @cached_property
    def firsts_E(self) -> Tensor:
        """The first branch of each answer or episode."""
        return torch.arange(len(self)) if self.branches_S is None else (self.branches_S == 0).nonzero()[:, 0]

    @cached_property
    def lasts_E(self) -> Tensor:
        """The last branch of each answer or episode."""
        return torch.cat([self.firsts_E[1:] - 1, torch.tensor([len(self) - 1])]) if len(self) else self.firsts_E

    @property
    def cut_off_S(self) -> Tensor:
        """Which samples a limit cut off."""
        return torch.isin(self.finishes_S, torch.tensor(CUT_OFF))

    @property
    def groups_E(self) -> Tensor:
        return self.groups_S[self.firsts_E]

    @property
    def answers_G(self) -> Tensor:
        """Number of answers in each group."""
        return torch.bincount(self.groups_E)

    @property
    def counts_N(self) -> Tensor:
        """For each sampled token: the number of sampled tokens in its answer or episode."""
        return self.lengths_E[self.episodes_S[self.owners_N]]

    @cached_property
    def lengths_E(self) -> Tensor:
        """Number of sampled tokens over all branches."""
        return self.lengths_S.new_zeros(len(self.firsts_E)).index_add(0, self.episodes_S, self.lengths_S)

    @cached_property
    def drawn_E(self) -> Tensor:
        """Which answers and episodes have a sampled token. The policy had no influence on the rewards of the others, so
        they are excluded from baselines."""
        return self.lengths_E > 0

    # ---- rewards

    @property
    def lacks_kl(self) -> bool:
        """Whether the advantages lack the KL to the reference because the policy's log-probs are computed in the
        update."""
        return self.reference_N is not None and self.old_N is None

    @cached_property
    def answer_rewards_S(self) -> Tensor:
        """Reward of the whole answer: its own reward plus, with process rewards, the mean over its steps."""
        if self.step_scores is None:
            return self.rewards_S
        found: list[list[float]] = [[] for _ in self.firsts_E]
        for episode, scores in zip(self.episodes_S.tolist(), self.step_scores):
            found[episode] += scores
        means_E = torch.tensor([sum(scores) / len(scores) if scores else 0.0 for scores in found])
        return self.rewards_S + means_E[self.episodes_S]

    def steps(self) -> tuple[Tensor, Tensor]:
        """Scores of all K steps, sample after sample, and the indices of their last tokens among the sampled tokens."""
        assert self.step_tokens is not None and self.step_scores is not None
        starts = self.starts_S.tolist()
        tokens = [start + token for start, found in zip(starts, self.step_tokens) for token in found]
        scores = [score for found in self.step_scores for score in found]
        return torch.tensor(scores, dtype=torch.float32), torch.tensor(tokens, dtype=torch.int64)

    def put(self, column: str, pieces: Sequence[tuple[Sequence[int], Tensor]]) -> None:
        """Fill a column over sampled tokens from (samples, values) pairs; samples in no pair get 0."""
        filled = np.zeros(len(self.sampled_N), dtype=np.float32)
        found = torch.cat([torch.zeros(0), *(values.float().cpu() for _, values in pieces)]).numpy()
        begin = 0
        for run in self.drawn_of(torch.tensor([i for samples, _ in pieces for i in samples], dtype=torch.int64)):
            end = begin + run.stop - run.start
            filled[run] = found[begin:end]
            begin = end
        assert begin == len(found), "a value for every token"
        setattr(self, column, torch.from_numpy(filled))

    @cached_property
    def taught(self) -> Trajectories:
        """The same responses after the prompts that the teacher reads. Columns over sampled tokens are the same."""
        if self.teacher_prompts is None:
            return self
        ends = (self.offsets_S + self.prompt_lengths_S).tolist()
        openings = [
            torch.tensor(own, dtype=torch.int32) if own else self.ids_T[end - length : end]
            for own, end, length in zip(self.teacher_prompts, ends, self.prompt_lengths_S.tolist())
        ]
        ids, drawn = [], []
        for opening, response in zip(openings, self._responses):
            ids += [opening, self.ids_T[response]]
            drawn += [torch.zeros(len(opening), dtype=torch.bool), self.drawn_T[response]]
        lengths_S = torch.tensor([len(opening) for opening in openings])
        after_S = self.sequence_lengths_S - self.prompt_lengths_S
        return Trajectories(torch.cat(ids), torch.cat(drawn), lengths_S, lengths_S + after_S)

    # ---- on disk

    def tensors(self) -> dict[str, Tensor]:
        """All columns as named tensors, for safetensors."""
        found = {f.name: getattr(self, f.name) for f in fields(self)}
        # Copies, because two columns may share one tensor, which safetensors rejects.
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
        versions_S = tensors.pop("versions_S", None)  # old recordings have one version per sample
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
            found = [EpisodeRecord.of_plain(plain) for plain in json.loads(episodes.numpy().tobytes())]
            experience.episodes = [found[episode] for episode in experience.episodes_S]
        return experience


def is_earlier(names: Iterable[str]) -> bool:
    """Whether these tensor names are of the old format with lists of tokens."""
    return "response_ids" in names


def _numbered(groups_S: Tensor) -> Tensor:
    """Renumber groups 0, 1, 2 and so on, in order."""
    return groups_S.unique_consecutive(return_inverse=True)[1]


# ---- turns of episodes in the order of time


class TimeOrder:
    """Reorders columns over sampled tokens: episode after episode, and by time within one, across branches."""

    def __init__(self, experience: Experience):
        self.experience = experience
        self.order_N = None if experience.branches_S is None else _order(experience)

    def sorted(self, column_N: Tensor) -> Tensor:
        return column_N if self.order_N is None else column_N[self.order_N]

    def back(self, sorted_N: Tensor) -> Tensor:
        """Undo `sorted`."""
        if self.order_N is None:
            return sorted_N
        return torch.empty_like(sorted_N).index_copy(0, self.order_N, sorted_N)

    @cached_property
    def places_N(self) -> Tensor:
        """Index of each token in the sorted order."""
        return self.back(torch.arange(len(self.experience.sampled_N)))

    # ---- columns in sorted order

    @property
    def owners_N(self) -> Tensor:
        """The episode of each token."""
        experience = self.experience
        if self.order_N is None:  # every sample is an answer
            return experience.owners_N
        return self.sorted(experience.episodes_S[experience.owners_N])

    @property
    def remaining_N(self) -> Tensor:
        """Number of later tokens in the same episode."""
        if self.order_N is None:
            return self.experience.remaining_N
        lengths_E = self.experience.lengths_E
        return torch.repeat_interleave(lengths_E.cumsum(0) - 1, lengths_E) - torch.arange(len(self.order_N))


def _order(experience: Experience) -> Tensor:
    """Indices of the sampled tokens in the order of time. Without episode records, branches follow one another."""
    if experience.episodes is None:
        return torch.arange(len(experience.sampled_N))
    turns = TurnLayout.of(experience)
    places_N = torch.arange(len(experience.sampled_N))
    order_N = joined(places_N, runs(turns.starts_K, turns.tokens_K + 1 - turns.starts_K))
    assert len(order_N) == len(places_N), "every sampled token belongs to a turn"
    return order_N


@dataclass
class TurnLayout:
    """The model's K turns in all episodes, in the order of time."""

    rewards_K: Tensor
    episodes_K: Tensor  # which answer or episode
    starts_K: Tensor  # first token, in the columns over sampled tokens
    tokens_K: Tensor  # last token

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
        assert bool((starts_K < ends_K).all()), "a turn has at least one sampled token"
        episodes_K = torch.tensor(episodes, dtype=torch.int64)
        return cls(torch.tensor(rewards, dtype=torch.float32), episodes_K, starts_K, ends_K - 1)
