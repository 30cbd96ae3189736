"""Agents: programs that call this run's policy server for their turns, and whose episodes become trajectories.

`AgentServerEngine` is an episode engine (envs/episode_engine.py): it starts an agent with the URL of an endpoint, runs
the requests in the server's queue in the inner engine's open session, and takes the server's record as the episode. The
server listens on 127.0.0.1 and answers only its own agents. A paused agent waits for the response to its next request.
"""

import secrets
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Protocol

from transformers import PreTrainedTokenizerBase

from trimtab.distributed.supervision import own_heartbeat
from trimtab.envs.environment_pool import EndReply, FailureReply, InstancePool, Reply
from trimtab.envs.episode_engine import EpisodeEngine, EpisodeSession, finished_branches, partial_branches
from trimtab.envs.types import EpisodeSettings, Task
from trimtab.rollout.engine import Engine
from trimtab.rollout.episode import EpisodeRecord, Segment
from trimtab.rollout.sampling import SamplingParams
from trimtab.rollout.trajectory import Finish, Trajectory
from trimtab.server.policy_server import PolicyServer
from trimtab.server.request_params import ServerDefaults
from trimtab.server.sessions import RecordedTurn, ServedPolicy, SessionRecord, branch_ends

POLL_SECONDS = 0.005  # while only agents are running
NAME = "policy"  # the model's name
NO_LIMIT = 2**20  # tokens, if the engine's context length is unknown
SECONDS_TO_END = 2.0


@dataclass
class AgentEpisode:
    """The episode of one running agent, and the server's record of its turns."""

    number: int  # of the agent's instance
    request: int
    seed: int  # of this sample
    task: Task
    prompt_ids: list[int]  # of the data row
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

    def rollouts(self, finish: Finish, problem: str | None = None) -> list[Trajectory]:
        """A trajectory for each branch, with the episode's record."""
        turns = list(self.record.turns)  # the server's thread may be about to add one
        episode = self._episode(turns, problem)
        return finished_branches(_sequences(turns), self.task, self.request, finish, episode, self.prompt_ids)

    def partials(self) -> list[Trajectory]:
        turns = list(self.record.turns)
        return partial_branches(_sequences(turns), self.task, self._episode(turns))

    def _episode(self, turns: list[RecordedTurn], problem: str | None = None) -> EpisodeRecord:
        calls = sum(len(turn.message.get("tool_calls", ())) for turn in turns)
        figures = {"tool_calls": float(calls), "tool_failures": 0.0, "unknown_tools": 0.0}
        logs = {**self.logs, **figures, "seconds_environment": self.seconds}
        return EpisodeRecord(_segments(turns), None, self.reward, logs, self.begun, problem)


def _segments(turns: list[RecordedTurn]) -> list[Segment]:
    """Every turn once, in the order of sampling, each in the branch that trains it, with the messages before it."""
    found: list[tuple[int, Segment]] = []
    known: set[int] = set()
    for branch, end in enumerate(branch_ends(turns)):
        place = 0
        for number, turn in enumerate(end.path):
            start = place + (len(turn.read) if number else 0)
            if turn.number not in known:
                if number and len(turn.read):
                    read = Segment(turn.new_messages, place, start, False, _content(turn.new_messages), branch=branch)
                    found.append((turn.number, read))
                stop = start + len(turn.rollout.tokens)
                text = turn.message.get("content") or ""
                sampled = Segment([turn.message], start, stop, True, text, turn.rollout.finish_reason, branch=branch)
                found.append((turn.number, sampled))
                known.add(turn.number)
            place = start + len(turn.rollout.tokens)
    return [segment for _, segment in sorted(found, key=itemgetter(0))]


def _sequences(turns: list[RecordedTurn]) -> list[Trajectory]:
    known: set[int] = set()
    return [_sequence(end.path, known) for end in branch_ends(turns)]


def _sequence(path: list[RecordedTurn], known: set[int]) -> Trajectory:
    """The trajectory of a branch; `known`: turns trained in earlier branches, to which those of this one are added."""
    found = Trajectory.empty(0, path[0].read.tolist())
    for number, turn in enumerate(path):
        if number:
            found = found.with_observation(turn.read)
        if turn.number in known:
            found = found.with_observation(turn.rollout.tokens)
        else:
            known.add(turn.number)
            found = found.with_turn(turn.rollout)
    return found


def _content(messages: list[dict]) -> str:
    return "\n".join(message.get("content") or "" for message in messages)


# ---- session and engine


class AgentServerSession(EpisodeSession[AgentEpisode]):
    def __init__(self, engine: "AgentServerEngine", sampling: SamplingParams):
        super().__init__(engine, sampling)
        self.engine = engine

    def begin(
        self, request: int, seed: int, task: Task, prompt_ids: list[int], limit: int, partials: list[Trajectory]
    ) -> None:
        """A partial episode is resumed only if its agent is still paused. Otherwise the agent is started again, because
        its program's state is lost. Agents limit the length of their turns themselves."""
        episode = partials[0].episode
        if (suspended := self.engine.resume_suspended(episode)) is not None:
            suspended.request = request
            self.active[suspended.number] = suspended
            return
        self._start(request, seed, task, prompt_ids, 1 if episode is None else episode.begun + 1, 0)

    def step(self, steps: int | None = None) -> list[Trajectory]:
        own_heartbeat.move()
        for agent in self.take_aborted():
            del self.active[agent.number]
            rollouts = agent.rollouts("abort")
            assert rollouts[0].episode is not None, "they have one"
            self.engine.suspend_episode(agent, rollouts[0].episode)
            self.finish(rollouts)
        queue = self.engine.server.queue
        if self._finished or not self.active:
            return self.take_finished()
        with own_heartbeat.waiting():  # agents have their own timeout
            asked = queue.wait(POLL_SECONDS)
        if asked:
            queue.step(self.inner, steps)
        for reply in self.engine.replies(0.0):
            if (answered := self.active.get(reply.episode)) is not None:
                self._take(answered, reply)
        return self.take_finished()

    def output_ids(self, request: int) -> list[int]:
        first = next((v for v in self.active.values() if (v.request, v.sample) == (request, 0)), None)
        sequences = [] if first is None else _sequences(list(first.record.turns))
        return sequences[0].tokens.tolist() if sequences else []

    def output_lengths(self) -> dict[tuple[int, int], int]:
        return {(agent.request, agent.sample): agent.tokens() for agent in list(self.active.values())}

    def partials(self) -> dict[int, list[Trajectory]]:
        found: dict[int, list[Trajectory]] = {}
        for agent in list(self.active.values()):
            found.setdefault(agent.request, []).extend(agent.partials())
        return found

    def close(self) -> None:
        for agent in list(self.active.values()):
            self._leave(agent)
        self.engine.drop_suspended(self.to_resume)
        self.engine.server.queue.suspend(self.inner)
        self.inner.close()
        self.engine.session_closed()

    # ---- an episode

    def _start(self, request: int, seed: int, task: Task, prompt_ids: list[int], begun: int, failures: int) -> None:
        number, session = next(self.engine.numbers), secrets.token_hex(8)
        record = SessionRecord(seed, self.engine.settings.max_turns, self.sampling)
        self.engine.server.sessions.open(session, record)
        agent = AgentEpisode(number, request, seed, task, prompt_ids, session, record, begun, failures)
        self.active[number] = agent
        self.engine.run(agent)

    def _take(self, agent: AgentEpisode, reply: Reply) -> None:
        refused = agent.record.refused
        if isinstance(reply, EndReply):
            agent.reward, agent.logs, agent.seconds = reply.reward, reply.logs, agent.seconds + reply.seconds
            if agent.record.turns:
                self._finish(agent, refused or "stop")
            else:
                self.failed(agent, "the agent has ended without asking for a turn")
        else:
            assert isinstance(reply, FailureReply), "an agent runs, and nothing else"
            if refused is not None and agent.record.turns:
                # Agents often fail without a reward when the context is full.
                self._finish(agent, refused)
            elif reply.innocent:
                self.retry(agent)
            else:
                self.failed(agent, reply.words)

    def retry(self, agent: AgentEpisode) -> None:
        self._leave(agent)
        self._start(agent.request, agent.seed, agent.task, agent.prompt_ids, agent.begun + 1, agent.failures)

    def give_up(self, agent: AgentEpisode, words: str | None) -> None:
        self._finish(agent, "failed", words)

    def _finish(self, agent: AgentEpisode, finish: Finish, problem: str | None = None) -> None:
        self._leave(agent)
        self.finish(agent.rollouts(finish, problem))

    def _leave(self, agent: AgentEpisode) -> None:
        self.active.pop(agent.number, None)
        self.engine.drop(agent)


class AgentPool(InstancePool, Protocol):
    """The processes in which agents run."""

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
        self.defaults = ServerDefaults((), len(tokenizer))
        policy = ServedPolicy(NAME, tokenizer, self.defaults, min(most, default=NO_LIMIT))
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
        self.defaults.stops, self.defaults.pinned = sampling.stop_token_ids, sampling
        if self._url is None:
            self._url = self.server.start()
        return AgentServerSession(self, sampling)

    # ---- for sessions

    def run(self, agent: AgentEpisode) -> None:
        base_url = f"{self._url}/s/{agent.session}/v1"
        self.pool.run(agent.number, agent.task, base_url=base_url, api_key=self._token, model=NAME)

    def drop(self, agent: AgentEpisode) -> None:
        """The server refuses the agent's further requests."""
        super().drop(agent)
        self.server.queue.release(agent.session)
        self.server.sessions.drop(agent.session)
        self.server.queue.cancel([agent.session])

    def suspend_episode(self, agent: AgentEpisode, episode: EpisodeRecord) -> None:
        """The agent may be waiting for its next turn, which the engine must not sample meanwhile."""
        self.server.queue.hold(agent.session)
        super().suspend_episode(agent, episode)

    def resume_suspended(self, episode: EpisodeRecord | None) -> AgentEpisode | None:
        if (agent := super().resume_suspended(episode)) is not None:
            self.server.queue.release(agent.session)
        return agent

    def close(self) -> None:
        """Close the agents and their server, not the inner engine."""
        super().close()
        if self._url is not None:
            self.server.stop()
            self.server.join()
