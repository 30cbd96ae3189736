"""The environment engine: its requests are episodes (reset, generate, step, observe), its results trajectories.

`EnvironmentEngine` is an engine itself, so that every caller of one can have episodes instead of single answers. Its
session generates turns in the inner engine's open session while environments answer other episodes:

    reset the environment; generate a turn; step the environment; append its observation; repeat until the episode is
    done or a limit is reached
"""

import json
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase

from trimtab.distributed.supervision import own_heartbeat
from trimtab.envs.chat_tokens import ChatTokens, ObservationError, as_observation_error
from trimtab.envs.environment_pool import EndReply, EnvironmentInstances, FailureReply, Reply, ResetReply, StepReply
from trimtab.envs.episode_engine import EpisodeEngine, EpisodeSession, finished_branches, partial_branches
from trimtab.envs.types import EpisodeSettings, Message, Step, Task, Turn
from trimtab.rollout.engine import Engine, decode_chunk_size
from trimtab.rollout.episode import EpisodeRecord, Segment
from trimtab.rollout.sampling import SamplingParams, request_seed
from trimtab.rollout.trajectory import Finish, Trajectory

COUNTERS = ("tool_calls", "tool_failures", "unknown_tools", "seconds_environment")


class EpisodePhase(Enum):
    """What an episode waits for."""

    RESETTING = auto()  # the environment's first observation
    REPLAYING = auto()  # a new instance, to be where the last one was
    GENERATING = auto()  # the engine
    STEPPING = auto()  # the environment's observation
    ENDING = auto()  # the reward of the whole episode


@dataclass(frozen=True)
class EpisodeSnapshot:
    """An episode's data at one moment. Replaced as a whole, because other threads read it."""

    trajectories: tuple[Trajectory, ...] = ()
    said: tuple[Segment, ...] = ()
    request: int | None = None  # of the engine's session, that generates the next turn
    part: Trajectory | None = None  # of the next turn, from which the engine resumes

    @property
    def turns(self) -> int:
        return sum([said.drawn for said in self.said])


@dataclass
class EpisodeState:
    number: int  # identifies the environment instance
    request: int
    seed: int  # of this sample
    task: Task
    prompt_ids: list[int]  # the row's
    limit: int  # of a turn
    now: EpisodeSnapshot = field(default_factory=EpisodeSnapshot)
    phase: EpisodePhase = EpisodePhase.RESETTING
    finish: Finish | None = None  # once it is known
    opening: list[Message] | None = None  # what reset returned
    chat: ChatTokens | None = None  # once its tools are known
    next_sampling: dict[str, Any] | None = None  # that the environment asks for in the next turn
    replayed: int = 0  # entries of the record that the new instance has seen
    begun: int = 1  # times from nothing
    failures: int = 0
    last_reward: float = 0.0
    logs: dict[str, float] = field(default_factory=dict)  # the environment's own
    counters: dict[str, float] = field(default_factory=lambda: dict.fromkeys(COUNTERS, 0.0))
    last_tools: dict[str, float] = field(default_factory=dict)
    """What the last turn adds to the counters, once its observation is in the record: until then the turn may be
    replayed in another instance."""
    since: float = field(default_factory=time.monotonic)  # when the engine began the current turn

    @property
    def sample(self) -> int:
        return self.task.sample

    @property
    def trajectory(self) -> Trajectory:
        return self.now.trajectories[-1]

    def restore(self, partials: list[Trajectory]) -> None:
        """Restore the state from partials, one for each of its sequences in order. The environment must be replayed."""
        record = partials[0].episode
        if record is None:
            return
        self.begun = record.begun
        if not record.said and not len(partials[0].tokens):  # it has not begun
            return
        self.opening = record.opening
        self.counters = {name: record.logs.get(name, 0.0) for name in COUNTERS}
        self.logs = {name: value for name, value in record.logs.items() if name not in COUNTERS}
        # Each has the row's prompt until the environment's reset gives its own.
        trajectories = tuple(
            replace(partial, prompt_ids=self.prompt_ids, drawn=partial.mask, episode=None) for partial in partials
        )
        last = len(trajectories) - 1
        end = max((said.end for said in record.said if said.branch == last), default=0)
        trajectory, part = trajectories[-1], None
        if (more := len(trajectory.tokens) - end) > 0:
            log_probs, versions = trajectory.log_probs, trajectory.versions
            part = Trajectory(0, 0, [], trajectory.tokens[end:], log_probs[-more:], versions=versions[-more:])
            part.routes = trajectory.routes
            routes = None if trajectory.routes is None else trajectory.routes[:-more]
            cut = replace(trajectory, tokens=trajectory.tokens[:end], drawn=trajectory.mask[:end], routes=routes)
            trajectories = (*trajectories[:-1], replace(cut, log_probs=log_probs[:-more], versions=versions[:-more]))
        self.now = EpisodeSnapshot(trajectories, tuple(record.said), part=part)

    def clear(self) -> None:
        """Begin from nothing."""
        self.now, self.finish, self.next_sampling, self.opening = EpisodeSnapshot(), None, None, None
        self.phase, self.replayed, self.last_reward, self.logs = EpisodePhase.RESETTING, 0, 0.0, {}
        self.counters, self.last_tools = dict.fromkeys(COUNTERS, 0.0), {}
        self.begun += 1

    def add(self, said: Segment, trajectories: tuple[Trajectory, ...]) -> None:
        self.now = EpisodeSnapshot(trajectories, (*self.now.said, said))

    def conversation(self, count: int | None = None) -> list[Message]:
        """All messages so far, or those of the first `count` entries of the record."""
        first = self.task.asked if self.opening is None else self.opening
        return [*first, *(message for said in self.now.said[:count] for message in said.messages)]

    def count_tools(self) -> None:
        for name, more in self.last_tools.items():
            self.counters[name] += more
        self.last_tools = {}

    # ---- what callers get

    def record(self, problem: str | None = None, now: EpisodeSnapshot | None = None) -> EpisodeRecord:
        now = now or self.now
        return EpisodeRecord(
            list(now.said), self.opening, self.last_reward, {**self.logs, **self.counters}, self.begun, problem
        )

    def partials(self, part: Trajectory | None, now: EpisodeSnapshot | None = None) -> list[Trajectory]:
        """The episode so far, with the part of the current turn that is generated."""
        now = now or self.now
        episode, trajectories = self.record(now=now), now.trajectories
        part = now.part if part is None else part
        if part is not None and trajectories:
            trajectories = (*trajectories[:-1], trajectories[-1].with_turn(part))
        return partial_branches(trajectories, self.task, episode)

    def rollouts(self, finish: Finish, episode: EpisodeRecord, plain: bool = False) -> list[Trajectory]:
        """One rollout for each of its sequences."""
        trajectories: Sequence[Trajectory] = self.now.trajectories
        if finish == "abort" and self.now.part is not None:
            trajectories = (*trajectories[:-1], trajectories[-1].with_turn(self.now.part))
        trajectories = [replace(s, plain_log_probs=s.plain_log_probs if plain else None) for s in trajectories]
        return finished_branches(trajectories, self.task, self.request, finish, episode, self.prompt_ids)


# ---- the engine


POLL_SECONDS = 0.05  # of waiting for environments while the engine has nothing to generate
NO_LIMIT = 2**31
MAX_CHAT_TOKENS = 64  # instances that an engine keeps


class EnvironmentEngine(EpisodeEngine[EpisodeState]):
    def __init__(
        self,
        engine: Engine,
        pool: EnvironmentInstances,
        tokenizer: PreTrainedTokenizerBase,
        settings: EpisodeSettings | None = None,
    ):
        assert pool.info.kind == "environment", "an agent asks for its turns itself"
        super().__init__(engine, pool, settings)
        self.pool, self.tokenizer = pool, tokenizer
        self._chat_tokens: dict[str, ChatTokens] = {}
        self.chat_tokens(pool.info.tools, ())  # refuses a chat template that cannot render them

    def open_session(self, sampling: SamplingParams) -> "EnvironmentSession":
        return EnvironmentSession(self, sampling)

    def chat_tokens(self, tools: Sequence[dict[str, Any]], stops: Collection[int]) -> ChatTokens:
        key = json.dumps([list(tools), sorted(stops)], sort_keys=True)
        if key not in self._chat_tokens:
            self._chat_tokens[key] = ChatTokens(self.tokenizer, tools, stops, self.settings)
            if len(self._chat_tokens) > MAX_CHAT_TOKENS:  # tools may differ between episodes
                del self._chat_tokens[next(iter(self._chat_tokens))]
        return self._chat_tokens[key]


class EnvironmentSession(EpisodeSession[EpisodeState]):
    def __init__(self, engine: EnvironmentEngine, sampling: SamplingParams):
        super().__init__(engine, sampling)
        self.engine = engine
        limits = engine.settings.episode_max_len, engine.context
        self.max_length = min((limit for limit in limits if limit is not None), default=NO_LIMIT)
        self.generating: dict[int, EpisodeState] = {}  # by the inner session's request
        self._prompts: dict[int, list[int]] = {}  # by request: its samples share one list
        self.inner.meanwhile = self._poll

    # ---- the session as callers see it

    def begin(
        self, request: int, seed: int, task: Task, prompt_ids: list[int], limit: int, partials: list[Trajectory]
    ) -> None:
        # Of a suspended episode the environment is still there.
        if (suspended := self.engine.resume_suspended(partials[0].episode)) is not None:
            suspended.request, suspended.limit = request, limit
            self.active[suspended.number] = suspended
            if suspended.phase is EpisodePhase.GENERATING:
                self._generate(suspended)
            return
        state = EpisodeState(next(self.engine.numbers), request, seed, task, prompt_ids, limit)
        state.restore(partials)
        self._reset(state)

    def step(self, steps: int | None = None) -> list[Trajectory]:
        own_heartbeat.move()
        self._abort(self.take_aborted())
        if self.inner.has_unfinished and not self._finished:
            if len(self.active) > len(self.generating):  # an environment may answer meanwhile
                steps = decode_chunk_size(steps, full=self.inner.full)
            for rollout in self.inner.step(steps):
                if (state := self.generating.pop(rollout.prompt, None)) is not None:
                    self._generated(state, rollout)
        if self.active:
            self._poll(0.0 if self.inner.has_unfinished or self._finished else POLL_SECONDS)
        return self.take_finished()

    def output_ids(self, request: int) -> list[int]:
        state = next((s for s in self.active.values() if (s.request, s.sample) == (request, 0)), None)
        if state is None or not state.now.trajectories:
            return []
        inner = [] if state.now.request is None else self.inner.output_ids(state.now.request)
        return state.trajectory.tokens.tolist() + inner

    def output_lengths(self) -> dict[tuple[int, int], int]:
        inner = self.inner.output_lengths()
        found = {}
        for state in list(self.active.values()):
            now = state.now
            drawn = sum(len(trajectory.log_probs) for trajectory in now.trajectories)
            part = 0 if now.part is None else len(now.part.tokens)
            more = part if now.request is None else inner.get((now.request, 0), part)
            found[state.request, state.sample] = drawn + more
        return found

    def partials(self) -> dict[int, list[Trajectory]]:
        inner = self.inner.partials()
        found: dict[int, list[Trajectory]] = {}
        for state in list(self.active.values()):
            now = state.now
            parts = [] if now.request is None else inner.get(now.request, [])
            found.setdefault(state.request, []).extend(state.partials(parts[0] if parts else None, now))
        return found

    def close(self) -> None:
        self.inner.close()
        for number in self.active:
            self.engine.pool.drop(number)
        self.active.clear()
        self.engine.drop_suspended(self.to_resume)
        self.engine.session_closed()

    # ---- replies of environments

    def _poll(self, seconds: float = 0.0) -> None:
        """Handle the replies that are there, or that come within this time."""
        with own_heartbeat.waiting():  # environments have their own time limits
            replies = self.engine.replies(seconds)
        for reply in replies:
            if (state := self.active.get(reply.episode)) is not None:
                self._handle(state, reply)

    def _handle(self, state: EpisodeState, reply: Reply) -> None:
        if isinstance(reply, FailureReply):
            self._leave_engine([state])
            if reply.innocent:  # replay it in a new instance
                state.replayed, state.phase = 0, EpisodePhase.RESETTING
                self._reset(state)
            else:
                self.failed(state, reply.words)
            return
        state.counters["seconds_environment"] += reply.seconds
        try:
            if isinstance(reply, ResetReply):
                self._opened(state, reply)
            elif isinstance(reply, EndReply):
                self._ended(state, reply)
            elif state.phase is EpisodePhase.REPLAYING:
                self._replayed(state, reply)
            else:
                self._stepped(state, reply)
        except ObservationError as error:
            self.engine.pool.drop(state.number)
            self._leave_engine([state])
            self.failed(state, str(error))

    # ---- the beginning and the end of an episode

    def _reset(self, state: EpisodeState) -> None:
        self.active[state.number] = state
        self.engine.pool.reset(state.number, state.task)

    def _opened(self, state: EpisodeState, reply: ResetReply) -> None:
        state.chat = self.engine.chat_tokens(reply.tools, self.sampling.stop_token_ids)
        prompt = first_tokens(state.chat, reply, state.task, state.prompt_ids)
        known = self._prompts.setdefault(state.request, prompt)
        prompt = known if known == prompt else prompt
        if not state.now.trajectories:
            state.opening, state.now = reply.messages, EpisodeSnapshot((Trajectory.empty(state.sample, prompt),))
            self._generate(state)
        elif reply.messages != state.opening:
            self._restart(state)
        else:
            state.now = replace(state.now, trajectories=_with_prompts(state, prompt))
            self._replay(state)

    def _end(self, state: EpisodeState, finish: Finish) -> None:
        state.finish, state.phase = finish, EpisodePhase.ENDING
        self.engine.pool.end(state.number)

    def _ended(self, state: EpisodeState, reply: EndReply) -> None:
        assert state.finish is not None
        state.count_tools()
        state.last_reward = reply.reward
        state.logs.update(reply.logs)
        self._finish(state, state.finish)

    def _finish(self, state: EpisodeState, finish: Finish, problem: str | None = None) -> None:
        del self.active[state.number]
        episode = state.record(problem)
        if finish == "abort" and state.phase not in (EpisodePhase.RESETTING, EpisodePhase.REPLAYING):
            self.engine.suspend_episode(state, episode)
        self.finish(state.rollouts(finish, episode, self.sampling.plain_log_probs))

    # ---- turns

    def _generate(self, state: EpisodeState) -> None:
        """Have the engine generate the next turn, if there is room for it."""
        own = state.next_sampling or {}
        trajectory, part = state.trajectory, state.now.part
        limit = min(own.get("max_new_tokens") or state.limit, self.max_length - trajectory.length)
        if limit < 1:
            self._end(state, "context")
            return
        stops = own.get("stop_strings")
        with as_observation_error():
            request = self.inner.add(
                trajectory.whole_ids,
                seed=request_seed(state.seed, state.now.turns),
                limit=limit,
                partials=None if part is None else [replace(part, sample=0)],
                sampling=replace(self.sampling, n=1, stop_strings=tuple(stops)) if stops else None,
            )
        state.phase, state.since = EpisodePhase.GENERATING, time.monotonic()
        state.now = EpisodeSnapshot(state.now.trajectories, state.now.said, request, part)
        self.generating[request] = state

    def _generated(self, state: EpisodeState, rollout: Trajectory) -> None:
        assert state.chat is not None and rollout.finish in ("stop", "length")
        trajectory = state.trajectory
        message, text = state.chat.parser.turn(rollout.ids, trajectory.whole_ids, state.chat.stops)
        start, branch = len(trajectory.tokens), len(state.now.trajectories) - 1
        said = Segment(
            *([message], start, start + len(rollout.ids), True, text, rollout.finish),
            seconds=time.monotonic() - state.since,
            branch=branch,
        )
        wrote = trajectory.with_turn(rollout)
        state.add(said, trajectories=(*state.now.trajectories[:-1], wrote))
        self._step(state, len(state.now.said) - 1)

    def _step(self, state: EpisodeState, index: int) -> None:
        """Give the environment the model's turn at this index of the record."""
        said = state.now.said[index]
        trajectory = state.now.trajectories[said.branch]
        number = sum([earlier.drawn for earlier in state.now.said[:index]])
        room = max(0, self.max_length - len(trajectory.prompt_ids) - said.end)
        finish: Literal["stop", "length"] = "length" if said.finish == "length" else "stop"
        ids = trajectory.tokens[said.start : said.end].tolist()
        if index == len(state.now.said) - 1:
            state.phase = EpisodePhase.STEPPING
        self.engine.pool.step(state.number, Turn(said.text, said.messages[0], ids, finish, number, room))

    def _stepped(self, state: EpisodeState, reply: StepReply) -> None:
        step = reply.step
        state.last_tools = {name: getattr(reply, name) for name in ("tool_calls", "tool_failures", "unknown_tools")}
        state.logs.update(step.logs)
        *before, turn = state.now.said
        assert turn.drawn, "an environment rewards turns of the model"
        state.now = replace(state.now, said=(*before, replace(turn, reward=step.reward)))
        if step.done:
            self._end(state, "length" if state.now.said[-1].finish == "length" else "stop")
        elif step.truncated:
            self._end(state, "truncated")
        elif state.now.turns >= self.engine.settings.max_turns:
            self._end(state, "turns")
        else:
            self._observe(state, step, reply.seconds)

    def _observe(self, state: EpisodeState, step: Step, seconds: float) -> None:
        """Append the observation, if there is room for it and one more token."""
        assert state.chat is not None
        messages, trajectory, trajectories = _observation(state.chat, step), state.trajectory, state.now.trajectories
        turn = state.now.said[-1]
        ids = step.ids
        if ids is None:
            drawn = trajectory.tokens[turn.start : turn.end].tolist()
            ids = state.chat.after(trajectory.whole_ids, drawn, state.conversation(), messages)
        elif not all(0 <= token < state.chat.vocabulary for token in ids):
            raise ObservationError(
                f"Step.ids has tokens that the tokenizer does not have: 0 to {state.chat.vocabulary - 1}"
            )
        if ids is not None:
            trajectories, read = trajectories[:-1], trajectory.with_observation(ids)
        else:  # the template has changed the history: the conversation goes on in a new branch
            whole = state.chat.opening([*state.conversation(), *messages])
            prompt = trajectories[0].prompt_ids
            kept = len(prompt) if whole[: len(prompt)] == prompt else 1
            read = Trajectory.empty(state.sample, prompt if kept > 1 else whole[:1]).with_observation(whole[kept:])
        if read.length + 1 > self.max_length:
            self._end(state, "context")
            return
        branch = len(trajectories)
        start = len(trajectory.tokens) if branch == turn.branch else 0
        said = Segment(messages, start, len(read.tokens), False, seconds=seconds, branch=branch)
        state.add(said, trajectories=(*trajectories, read))
        state.count_tools()
        state.next_sampling = step.sampling
        self._generate(state)

    # ---- replay: a new instance of the environment is given the earlier turns and must answer them alike

    def _replay(self, state: EpisodeState) -> None:
        """Give the new instance the next turn whose answer is known, or go on with the episode."""
        index = next_answered(state.now.said, state.replayed)
        if index is not None:
            state.phase = EpisodePhase.REPLAYING
            self._step(state, index)
        elif state.now.said and state.now.said[-1].drawn:
            self._step(state, len(state.now.said) - 1)
        else:
            self._generate(state)

    def _replayed(self, state: EpisodeState, reply: StepReply) -> None:
        index = next_answered(state.now.said, state.replayed)
        assert index is not None and state.chat is not None
        step, answer = reply.step, state.now.said[index + 1]
        if step.done or step.truncated:
            same = False
        elif step.ids is not None:
            same = step.ids == state.now.trajectories[answer.branch].tokens[answer.start : answer.end].tolist()
        else:
            same = _observation(state.chat, step) == answer.messages
        if not same:
            self._restart(state)
            return
        state.replayed, state.next_sampling = index + 2, step.sampling
        self._replay(state)

    def _restart(self, state: EpisodeState) -> None:
        """Begin the episode anew, in another instance."""
        self.engine.pool.drop(state.number)
        del self.active[state.number]
        state.number = next(self.engine.numbers)
        state.clear()
        self._reset(state)

    # ---- retries and aborts

    def retry(self, state: EpisodeState) -> None:
        state.clear()
        self._reset(state)

    def give_up(self, state: EpisodeState, words: str | None) -> None:
        self._leave_engine([state])
        self.engine.pool.drop(state.number)
        self._finish(state, "failed", words)

    def _abort(self, aborted: list[EpisodeState]) -> None:
        self._leave_engine(aborted)
        for state in aborted:
            if state.phase in (EpisodePhase.RESETTING, EpisodePhase.REPLAYING):
                self.engine.pool.drop(state.number)
            self._finish(state, "abort")

    def _leave_engine(self, states: list[EpisodeState]) -> None:
        """Stop generating their turns, and keep the tokens that they have so far."""
        by_request = {state.now.request: state for state in states if state.now.request is not None}
        if not by_request:
            return
        parts = self.inner.partials()
        self.inner.abort(list(by_request))
        for request, state in by_request.items():
            del self.generating[request]
            part = parts[request][0]
            state.now = replace(state.now, request=None, part=part if len(part.tokens) else None)


def first_tokens(chat: ChatTokens, reply: ResetReply, task: Task, prompt_ids: list[int]) -> list[int]:
    """The tokens that an episode begins with: what `reset` returned, or the row's prompt. The prompt is rendered again
    if there are tools, because the template writes them with it."""
    first = task.asked if reply.messages is None and reply.tools else reply.messages
    prompt = prompt_ids if first is None else chat.opening(first)
    if not prompt:
        raise ObservationError("an episode begins with no tokens at all: reset and the row's prompt are empty")
    return prompt


def next_answered(said: Sequence[Segment], since: int) -> int | None:
    """The index of the next turn of the model whose answer is in the record."""
    return next((i for i in range(since, len(said) - 1) if said[i].drawn and not said[i + 1].drawn), None)


def _observation(chat: ChatTokens, step: Step) -> list[Message]:
    messages = [{"role": "user", "content": step.messages}] if isinstance(step.messages, str) else step.messages
    return chat.shortened(messages)


def _with_prompts(state: EpisodeState, prompt: list[int]) -> tuple[Trajectory, ...]:
    """The sequences of an episode that was restored from partials, which have no prompts: each begins with the
    conversation as it was rendered then."""
    assert state.chat is not None
    trajectories = [replace(state.now.trajectories[0], prompt_ids=prompt)]
    for branch, trajectory in enumerate(state.now.trajectories[1:], start=1):
        index = next(index for index, said in enumerate(state.now.said) if said.branch == branch)
        ids = state.chat.opening(state.conversation(index + 1))
        trajectories.append(replace(trajectory, prompt_ids=ids[: len(ids) - state.now.said[index].end]))
    return tuple(trajectories)
