"""An agent's episode: a program that asks a server for turns, and the record of what it was given."""

import secrets
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Protocol

import numpy as np
from transformers import PreTrainedTokenizerBase

from trimtab.distributed.watch import pulse
from trimtab.envs.episode_engine import EpisodeEngine, EpisodeSession, InstancePool
from trimtab.envs.pool import Broken, Ended, Reply
from trimtab.envs.types import EpisodeSettings, Task
from trimtab.rollout.engine import Engine
from trimtab.rollout.episode import Episode, Said
from trimtab.rollout.sampling import SamplingParams
from trimtab.rollout.trajectory import Draft, Finish, Rollout
from trimtab.server.policy_server import PolicyServer
from trimtab.server.request_params import ServerDefaults
from trimtab.server.sessions import RecordedTurn, ServedPolicy, SessionRecord, ends_of


@dataclass(frozen=True)
class Sequence:
    """One branch: tokens behind a prompt. A turn that several branches have is drawn in the first of them alone."""

    prompt_ids: list[int]
    tokens: np.ndarray
    drawn: np.ndarray
    log_probs: np.ndarray
    versions: np.ndarray
    plain_log_probs: np.ndarray | None


@dataclass
class AgentEpisode:
    number: int  # of the agent's instance
    request: int
    seed: int  # of this sample
    task: Task
    prompt_ids: list[int]  # the row's
    session: str
    record: SessionRecord
    begun: int = 1
    failures: int = 0
    reward: float = 0.0
    logs: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def sample(self) -> int:
        return self.task.sample

    def tokens(self) -> int:
        return sum(len(turn.rollout.tokens) for turn in list(self.record.turns))

    def rollouts(self, finish: Finish, problem: str | None = None) -> list[Rollout]:
        """One for each branch, with the episode's record."""
        turns = list(self.record.turns)  # the server's thread may be about to add one
        episode = self._episode(turns, problem)
        sequences = [] if finish == "failed" else _sequences(turns)
        return [
            Rollout(
                *(self.request, self.sample, s.prompt_ids, s.tokens, s.log_probs, finish),
                *(s.plain_log_probs, s.versions, s.drawn, episode, branch),
            )
            for branch, s in enumerate(sequences or [_nothing(self.prompt_ids)])
        ]

    def drafts(self) -> list[Draft]:
        turns = list(self.record.turns)
        episode = self._episode(turns)
        return [
            Draft(self.sample, s.tokens, s.log_probs, s.versions, None, s.drawn, episode, branch)
            for branch, s in enumerate(_sequences(turns))
        ] or [Draft.empty(self.sample)]

    def _episode(self, turns: list[RecordedTurn], problem: str | None = None) -> Episode:
        calls = sum(len(turn.message.get("tool_calls", ())) for turn in turns)
        figures = {"tool_calls": float(calls), "tool_failures": 0.0, "unknown_tools": 0.0}
        logs = {**self.logs, **figures, "seconds_environment": self.seconds}
        return Episode(_said(turns), None, self.reward, logs, self.begun, problem)

    def first_sequence(self) -> Sequence | None:
        return next(iter(_sequences(list(self.record.turns))), None)


def _said(turns: list[RecordedTurn]) -> list[Said]:
    """Every turn once, as they were drawn, each in the branch that has it as drawn, with what was read before."""
    found: list[tuple[int, Said]] = []
    known: set[int] = set()
    for branch, end in enumerate(ends_of(turns)):
        place = 0
        for number, turn in enumerate(end.path):
            start = place + (len(turn.read) if number else 0)
            if turn.number not in known:
                if number and len(turn.read):
                    read = Said(turn.said, place, start, False, _words(turn.said), branch=branch)
                    found.append((turn.number, read))
                stop = start + len(turn.rollout.tokens)
                text = turn.message.get("content") or ""
                said = Said([turn.message], start, stop, True, text, turn.rollout.finish, branch=branch)
                found.append((turn.number, said))
                known.add(turn.number)
            place = start + len(turn.rollout.tokens)
    return [said for _, said in sorted(found, key=itemgetter(0))]


def _sequences(turns: list[RecordedTurn]) -> list[Sequence]:
    known: set[int] = set()
    return [_sequence(end.path, known) for end in ends_of(turns)]


def _sequence(path: list[RecordedTurn], known: set[int]) -> Sequence:
    """`known`: turns that earlier branches have drawn; those of this one are added."""
    tokens: list[np.ndarray] = []
    drawn: list[np.ndarray] = []
    fresh: list[Rollout] = []
    for number, turn in enumerate(path):
        read = turn.read if number else turn.read[:0]
        own = turn.number not in known
        known.add(turn.number)
        fresh += [turn.rollout] if own else []
        tokens += [read, turn.rollout.tokens]
        drawn += [np.zeros(len(read), dtype=bool), np.full(len(turn.rollout.tokens), own)]
    plain = [rollout.plain_log_probs for rollout in fresh if rollout.plain_log_probs is not None]
    versions = [rollout.versions for rollout in fresh if rollout.versions is not None]
    assert len(versions) == len(fresh), "every engine says which weights drew"
    return Sequence(
        path[0].read.tolist(),
        np.concatenate(tokens),
        np.concatenate(drawn),
        np.concatenate([rollout.log_probs for rollout in fresh]),
        np.concatenate(versions),
        np.concatenate(plain) if plain else None,
    )


def _nothing(prompt_ids: list[int]) -> Sequence:
    ints = np.zeros(0, dtype=np.int32)
    return Sequence(prompt_ids, ints, ints.astype(bool), ints.astype(np.float32), ints, None)


def _words(messages: list[dict]) -> str:
    return "\n".join(message.get("content") or "" for message in messages)


# ---- Agents at work: programs that ask this run's own server for turns, which the engine's open se


LOOK_EVERY = 0.005  # seconds, where only agents are waited for


class AgentServerSession(EpisodeSession[AgentEpisode]):
    def __init__(self, engine: "AgentServerEngine", sampling: SamplingParams):
        super().__init__(engine, sampling)
        self.engine = engine

    # ---- what callers do

    def begin(
        self, request: int, seed: int, task: Task, prompt_ids: list[int], limit: int, drafts: list[Draft]
    ) -> None:
        """A draft is gone on from only by the agent that it is of, while that waits; of any other, the agent begins
        anew, for what it was thinking nobody knows. It says itself how long its turns may be."""
        episode = drafts[0].episode
        if (parked := self.engine.unpark(episode)) is not None:
            parked.request = request
            self.under_way[parked.number] = parked
            return
        self._start(request, seed, task, prompt_ids, 1 if episode is None else episode.begun + 1, 0)

    def advance(self, steps: int | None = None) -> list[Rollout]:
        pulse.move()
        self._take_aborted()
        desk = self.engine.server.desk
        if self._finished or not self.under_way:
            return self.take_finished()
        with pulse.waiting():  # an agent has a limit of its own
            asked = desk.wait(LOOK_EVERY)
        if asked:
            desk.work(self.inner, steps)
        for reply in self.engine.replies(0.0):
            if (visit := self.under_way.get(reply.episode)) is not None:
                self._take(visit, reply)
        return self.take_finished()

    def drawn(self, request: int) -> list[int]:
        first = next((v for v in self.under_way.values() if (v.request, v.sample) == (request, 0)), None)
        sequence = None if first is None else first.first_sequence()
        return [] if sequence is None else sequence.tokens.tolist()

    def at_work(self) -> dict[tuple[int, int], int]:
        return {(visit.request, visit.sample): visit.tokens() for visit in list(self.under_way.values())}

    def drafts(self) -> dict[int, list[Draft]]:
        found: dict[int, list[Draft]] = {}
        for visit in list(self.under_way.values()):
            found.setdefault(visit.request, []).extend(visit.drafts())
        return found

    def close(self) -> None:
        for visit in list(self.under_way.values()):
            self._leave(visit)
        self.engine.give_up(self.to_resume)
        self.engine.server.desk.set_down(self.inner)
        self.inner.close()
        self.engine.ended()

    # ---- one episode

    def _start(self, request: int, seed: int, task: Task, prompt_ids: list[int], begun: int, failures: int) -> None:
        number, session = next(self.engine.numbers), self.engine.new_session()
        record = SessionRecord(seed, self.engine.settings.max_turns, self.sampling)
        self.engine.server.records.open(session, record)
        visit = AgentEpisode(number, request, seed, task, prompt_ids, session, record, begun, failures)
        self.under_way[number] = visit
        self.engine.run(visit)

    def _take(self, visit: AgentEpisode, reply: Reply) -> None:
        refused = visit.record.refused
        if isinstance(reply, Ended):
            visit.reward, visit.logs, visit.seconds = reply.reward, reply.logs, visit.seconds + reply.seconds
            if visit.record.turns:
                self._hand_over(visit, refused or "stop")
            else:
                self._failed(visit, "the agent has ended without asking for a turn")
        else:
            assert isinstance(reply, Broken), "an agent runs, and nothing else"
            if refused is not None and visit.record.turns:
                # Agents that are told that there is no room often give up like this; what they had earned, they say
                # to nobody.
                self._hand_over(visit, refused)
            elif reply.innocent:
                self._again(visit, visit.failures)
            else:
                self._failed(visit, reply.words)

    def _failed(self, visit: AgentEpisode, words: str) -> None:
        if visit.failures < self.engine.settings.retries:
            self._again(visit, visit.failures + 1)
            return
        self._hand_over(visit, "failed", words)
        for other in [other for other in self.under_way.values() if other.request == visit.request]:
            self._hand_over(other, "failed")

    def _again(self, visit: AgentEpisode, failures: int) -> None:
        self._leave(visit)
        self._start(visit.request, visit.seed, visit.task, visit.prompt_ids, visit.begun + 1, failures)

    def _hand_over(self, visit: AgentEpisode, finish: Finish, problem: str | None = None) -> None:
        self._leave(visit)
        rollouts = visit.rollouts(finish, problem)
        if finish != "failed":
            last = rollouts[-1]
            assert last.episode is not None, "they have one"
            length, turns = float(len(last.prompt_ids) + len(last.tokens)), float(len(last.episode.turns))
            last.episode.logs |= {"turns": turns, "episode_length": length, "branches": float(len(rollouts))}
        self._finished += rollouts

    def _leave(self, visit: AgentEpisode) -> None:
        self.under_way.pop(visit.number, None)
        self.engine.drop(visit)

    def _take_aborted(self) -> None:
        gone = [visit for visit in self.under_way.values() if visit.request in self._aborted]
        self._aborted.clear()
        for visit in gone:
            del self.under_way[visit.number]
            rollouts = visit.rollouts("abort")
            assert rollouts[0].episode is not None, "they have one"
            self.engine.park(visit, rollouts[0].episode)
            self._finished += rollouts


# ---- AgentPool around an engine: prompts become episodes of programs that ask this run's own serve


NAME = "policy"  # of the model
NO_LIMIT = 2**20  # tokens, where nobody knows the engine's context
SECONDS_TO_END = 2.0


class AgentPool(InstancePool, Protocol):
    """Programs."""

    def run(self, episode: int, task: Task, *, base_url: str, api_key: str, model: str) -> None: ...


class AgentServerEngine(EpisodeEngine[AgentEpisode]):
    def __init__(
        self,
        engine: Engine,
        pool: AgentPool,
        tokenizer: PreTrainedTokenizerBase,
        settings: EpisodeSettings | None = None,
    ):
        super().__init__(engine, pool, settings)
        self.pool = pool
        most = [limit for limit in (self.settings.episode_max_len, engine.context) if limit is not None]
        self.house = ServerDefaults((), len(tokenizer))
        policy = ServedPolicy(NAME, tokenizer, self.house, min(most, default=NO_LIMIT))
        self._token = secrets.token_urlsafe(24)
        self.server = PolicyServer(
            policy,
            token=self._token,
            version=lambda: engine.version,
            max_waiting=2**20,
            drain_seconds=SECONDS_TO_END,
            invited=True,
        )
        self._url: str | None = None

    def open_session(self, sampling: SamplingParams) -> AgentServerSession:
        self.house.stops, self.house.pinned = sampling.stop_token_ids, sampling
        if self._url is None:
            self._url = self.server.start()
        return AgentServerSession(self, sampling)

    # ---- what sessions ask

    def new_session(self) -> str:
        return secrets.token_hex(8)

    def run(self, visit: AgentEpisode) -> None:
        base_url = f"{self._url}/s/{visit.session}/v1"
        self.pool.run(visit.number, visit.task, base_url=base_url, api_key=self._token, model=NAME)

    def drop(self, visit: AgentEpisode) -> None:
        """Its program, where it still runs, has nobody to ask any more."""
        super().drop(visit)
        self.server.desk.let_go(visit.session)
        self.server.records.forget(visit.session)
        self.server.desk.give_up([visit.session])

    def park(self, visit: AgentEpisode, episode: Episode) -> None:
        """It may be asking for its next turn, which is not others' to draw."""
        self.server.desk.hold(visit.session)
        super().park(visit, episode)

    def unpark(self, episode: Episode | None) -> AgentEpisode | None:
        if (visit := super().unpark(episode)) is not None:
            self.server.desk.let_go(visit.session)
        return visit

    def close(self) -> None:
        """The agents and their server; the engine inside is its owner's to close."""
        super().close()
        if self._url is not None:
            self.server.stop()
            self.server.join()
