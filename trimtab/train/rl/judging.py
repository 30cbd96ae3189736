"""Finished answers, and what the rewards near the engine say of them.

Groups that outlive an update are judged one by one, several at once in threads: a reward that is slow for one of them
holds up no other.
"""

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, overload

from trimtab.data.tokenizer import texts_of
from trimtab.rewards.build import Parts
from trimtab.rewards.functions import CALLS_AT_ONCE
from trimtab.rewards.requests import PromptBatch, make_reward_request
from trimtab.rewards.types import RewardFailed, RewardRequest, RewardResult
from trimtab.rollout.trajectory import Trajectory
from trimtab.sandbox.process import RunStopped
from trimtab.train.rl.answers import Answers, Written
from trimtab.train.rl.experience import Experience
from trimtab.train.rl.spans import JUDGING, Spans


class Several:
    """What each of several rewards says of finished samples. A complaint names the row of the data that it is about."""

    def __init__(self, rewards: Parts, questions: PromptBatch, tokenizer: Any):
        self.rewards, self.questions, self.tokenizer = rewards, questions, tokenizer
        self.concurrent = all(reward.concurrent for reward, _ in rewards)

    def __call__(self, rollouts: Sequence[Trajectory]) -> list[RewardResult]:
        return self.judge(self.request(rollouts), rollouts) if self.rewards else []

    def judge(self, request: RewardRequest, rollouts: Sequence[Trajectory]) -> list[RewardResult]:
        """`request`: that of these samples."""
        try:
            return [reward(request) for reward, _ in self.rewards]
        except RewardFailed as error:
            if error.row is not None:
                error.row = self.questions.rows[rollouts[error.row].prompt]
            raise

    def request(self, rollouts: Sequence[Trajectory]) -> RewardRequest:
        """Their text without the token that ended it."""
        responses = texts_of(self.tokenizer, [r.tokens for r in rollouts])
        ids = [r.prompt_ids for r in rollouts], Drawn(rollouts)
        episodes = [r.episode for r in rollouts if r.episode is not None]
        openings = self.tokenizer.batch_decode(ids[0]) if episodes else []
        return make_reward_request(self.questions, [r.prompt for r in rollouts], responses, *ids, episodes, openings)


class Drawn(Sequence[list[int]]):
    """The tokens of answers, as lists that are made where somebody asks for them: most rewards do not."""

    def __init__(self, rollouts: Sequence[Trajectory]):
        self.rollouts = rollouts

    def __len__(self) -> int:
        return len(self.rollouts)

    @overload
    def __getitem__(self, place: int) -> list[int]: ...
    @overload
    def __getitem__(self, place: slice) -> "Drawn": ...
    def __getitem__(self, place: int | slice) -> "list[int] | Drawn":
        found = self.rollouts[place]
        return found.ids if isinstance(found, Trajectory) else Drawn(found)

    def __reduce__(self) -> tuple:
        return list, (list(self),)


class Judging:
    """Of whole groups, in threads of its own. `news`: notified when there is something to take."""

    def __init__(self, rewards: Parts, tokenizer: Any, spans: Spans):
        self.rewards, self.tokenizer, self.spans = rewards, tokenizer, spans
        self.news = threading.Condition()
        self._threads = ThreadPoolExecutor(CALLS_AT_ONCE, thread_name_prefix="rewards")
        self._judged: list[Judged] = []
        self._failure: BaseException | None = None

    def submit(self, place: int, questions: PromptBatch, rollouts: Sequence[Trajectory]) -> None:
        """All answers to the one question, in order."""
        if not self.rewards:
            return self._tell(Judged(place, questions, rollouts, []))
        several = Several(self.rewards, questions, self.tokenizer)
        assert several.concurrent, "a model is a role of its own, and judges elsewhere"
        # Text is made here: a tokenizer is not for many threads.
        self._threads.submit(self._judge, place, several, several.request(rollouts), rollouts)

    def _judge(self, place: int, several: Several, request: RewardRequest, rollouts: Sequence[Trajectory]) -> None:
        try:
            with self.spans.during(JUDGING):
                results = several.judge(request, rollouts)
            self._tell(Judged(place, several.questions, rollouts, results))
        except RunStopped:
            pass  # the run has been told to stop, and nobody waits for this group: it is saved as it is
        except BaseException as error:
            with self.news:
                self._failure = self._failure or error
                self.news.notify_all()

    def _tell(self, judged: "Judged") -> None:
        with self.news:
            self._judged.append(judged)
            self.news.notify_all()

    @property
    def ready(self) -> bool:
        return bool(self._judged) or self._failure is not None

    def take(self) -> list[Written]:
        """What was judged since the last time; raises what a reward has failed with."""
        with self.news:
            if self._failure is not None:
                raise self._failure
            judged, self._judged = self._judged, []
        return [group.written() for group in judged]

    def close(self) -> None:
        """What has not begun is dropped. What has ends with its rewards."""
        self._threads.shutdown(wait=False, cancel_futures=True)


@dataclass(frozen=True)
class Judged:
    """A group, and what each reward says of it. Tensors are made of it where it is taken, not in a thread."""

    place: int
    questions: PromptBatch
    rollouts: Sequence[Trajectory]
    results: list[RewardResult]

    def written(self) -> Written:
        rows = [self.questions.rows[rollout.prompt] for rollout in self.rollouts]
        return Written(self.place, Answers(Experience.of(rows, self.rollouts), self.results))
