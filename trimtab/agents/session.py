"""Episodes at work: turns are drawn in the engine's open session while environments answer others.

open an instance; draw a turn, give it to the environment, read what it says; repeat until it is over, or a limit is met
"""

import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Literal

from trimtab.agents.language import CannotSay, refusing
from trimtab.agents.mishaps import Mishaps
from trimtab.agents.play import Moment, Play, Stage, Strand
from trimtab.agents.replaying import Replaying, words_of
from trimtab.distributed.watch import pulse
from trimtab.envs.episode import Said
from trimtab.envs.replies import Broken, Ended, Opened, Reply, Stepped
from trimtab.envs.types import Message, Step, Task, Turn
from trimtab.rollout.engine import STEPS_AMONG_OTHERS
from trimtab.rollout.seeds import request_seed
from trimtab.rollout.types import Draft, Finish, Rollout, Sampling

if TYPE_CHECKING:
    from trimtab.agents.engine import AgentEngine

LOOK_EVERY = 0.05  # seconds, where only environments are waited for
NO_LIMIT = 2**31


class AgentSession:
    def __init__(self, engine: "AgentEngine", sampling: Sampling):
        self.engine, self.sampling = engine, sampling
        self.requests = 0
        self.inner = engine.engine.session(replace(sampling, n=1))
        most = engine.settings.episode_max_len, engine.context
        self.longest = min((limit for limit in most if limit is not None), default=NO_LIMIT)
        self.plays: dict[int, Play] = {}  # by the numbers of their instances
        self.writing: dict[int, Play] = {}  # by the inner session's requests
        self.replaying, self.mishaps = Replaying(self), Mishaps(self)
        self._aborted: set[int] = set()
        self._prompts: dict[int, list[int]] = {}  # of every request, for its samples to share
        self._finished: list[Rollout] = []
        self._parked_before = engine.parked()

    # ---- what callers do

    def add(
        self,
        prompt_ids: list[int],
        *,
        seed: int | None = None,
        limit: int | None = None,
        drafts: Sequence[Draft] | None = None,
        task: Task | None = None,
        sampling: Sampling | None = None,
    ) -> int:
        assert sampling is None, "all episodes of a session are drawn alike"
        number, limit = self.requests, self.sampling.max_new_tokens if limit is None else limit
        seed = request_seed(self.sampling.seed, number) if seed is None else seed
        task = Task(number, 0, seed & (2**31 - 1)) if task is None else task
        given: dict[int, list[Draft]] = {}
        for draft in [Draft.empty(sample) for sample in range(self.sampling.n)] if drafts is None else drafts:
            assert draft.finish is None, "an episode that has not ended"
            given.setdefault(draft.sample, []).append(draft)
        self.requests += 1
        for sample, own in given.items():
            own.sort(key=lambda draft: draft.branch)
            parked = self.engine.unpark(own[0].episode)
            if parked is not None:
                parked.request, parked.limit = number, limit
                self._resume(parked)
                continue
            instance, at = next(self.engine.numbers), replace(task, sample=sample)
            play = Play(instance, number, request_seed(seed, sample), at, list(prompt_ids), limit)
            play.restore(own)
            self.open(play)
        return number

    @property
    def busy(self) -> bool:
        return bool(self.plays or self._finished)

    def __iter__(self) -> Iterator[Rollout]:
        while self.busy:
            yield from self.advance()

    def advance(self, steps: int | None = None) -> list[Rollout]:
        pulse.move()
        aborted, self._aborted = self._aborted, set()
        self.mishaps.abort(aborted)
        if self.inner.busy and not self._finished:
            if len(self.plays) > len(self.writing):  # an environment may answer meanwhile
                steps = min(steps or STEPS_AMONG_OTHERS, STEPS_AMONG_OTHERS)
            for rollout in self.inner.advance(steps):
                if (play := self.writing.pop(rollout.prompt, None)) is not None:
                    self._wrote(play, rollout)
        if self.plays:
            with pulse.waiting():  # an environment has a limit of its own
                replies = self.engine.replies(0.0 if self.inner.busy or self._finished else LOOK_EVERY)
            for reply in replies:
                if (play := self.plays.get(reply.episode)) is not None:
                    self._take(play, reply)
        finished, self._finished = self._finished, []
        return finished

    def drawn(self, request: int) -> list[int]:
        play = next((p for p in self.plays.values() if (p.request, p.sample) == (request, 0)), None)
        if play is None or not play.now.strands:
            return []
        inner = [] if play.now.request is None else self.inner.drawn(play.now.request)
        return play.strand.tokens.tolist() + inner

    def at_work(self) -> dict[tuple[int, int], int]:
        inner = self.inner.at_work()
        found = {}
        for play in list(self.plays.values()):
            now = play.now
            tokens = sum(len(strand.tokens) for strand in now.strands)
            part = 0 if now.part is None else len(now.part.tokens)
            more = part if now.request is None else inner.get((now.request, 0), part)
            found[play.request, play.sample] = tokens + more
        return found

    def drafts(self) -> dict[int, list[Draft]]:
        inner = self.inner.drafts()
        found: dict[int, list[Draft]] = {}
        for play in list(self.plays.values()):
            now = play.now
            parts = [] if now.request is None else inner.get(now.request, [])
            found.setdefault(play.request, []).extend(play.drafts(parts[0] if parts else None, now))
        return found

    def abort(self, requests: Collection[int] | None = None) -> None:
        self._aborted.update(range(self.requests) if requests is None else requests)

    def close(self) -> None:
        self.inner.close()
        for number in self.plays:
            self.engine.pool.drop(number)
        self.plays.clear()
        self.engine.give_up(self._parked_before)
        self.engine.ended()

    def __enter__(self) -> "AgentSession":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    # ---- one episode

    def open(self, play: Play) -> None:
        self.plays[play.number] = play
        self.engine.pool.reset(play.number, play.task)

    def _take(self, play: Play, reply: Reply) -> None:
        if isinstance(reply, Broken):
            self.mishaps.broken(play, reply)
            return
        play.figures["seconds_environment"] += reply.seconds
        try:
            if isinstance(reply, Opened):
                self._opened(play, reply)
            elif isinstance(reply, Ended):
                self._ended(play, reply)
            elif play.stage is Stage.REPLAYING:
                self.replaying.answered(play, reply)
            else:
                self._answered(play, reply)
        except CannotSay as error:
            self.engine.pool.drop(play.number)
            self.mishaps.broken(play, Broken(play.number, str(error)))

    def _opened(self, play: Play, reply: Opened) -> None:
        play.language = language = self.engine.language(reply.tools, self.sampling.stop_token_ids)
        first = reply.messages
        if first is None and reply.tools:
            first = _messages(play.task)
        prompt = play.prompt_ids if first is None else language.opening(first)
        if not prompt:
            raise CannotSay("an episode begins with no tokens at all: reset and the row's prompt are empty")
        prompt = self._shared(play.request, prompt)
        if not play.now.strands:
            play.opening, play.now = reply.messages, Moment((Strand.of(prompt),))
            self.write(play)
        elif reply.messages != play.opening:
            self.replaying.begin_anew(play)
        else:
            play.now = replace(play.now, strands=self.replaying.with_prompts(play, prompt))
            self.replaying.go_on(play)

    def _shared(self, request: int, prompt: list[int]) -> list[int]:
        known = self._prompts.setdefault(request, prompt)
        return known if known == prompt else prompt

    def conversation(self, play: Play, count: int | None = None) -> list[Message]:
        """Everything up to now, or the first so many things that were said."""
        first = _messages(play.task) if play.opening is None else play.opening
        return [*first, *(message for said in play.now.said[:count] for message in said.messages)]

    def write(self, play: Play) -> None:
        """Have the next turn drawn, if there is room for it."""
        own = play.next_sampling or {}
        strand, part = play.strand, play.now.part
        limit = min(own.get("max_new_tokens") or play.limit, self.longest - strand.length)
        if limit < 1:
            self._end(play, "context")
            return
        stops = own.get("stop_strings")
        with refusing():
            request = self.inner.add(
                strand.ids,
                seed=request_seed(play.seed, play.now.turns),
                limit=limit,
                drafts=None if part is None else [replace(part, sample=0)],
                sampling=replace(self.sampling, n=1, stop_strings=tuple(stops)) if stops else None,
            )
        play.stage, play.since = Stage.WRITING, time.monotonic()
        play.now = replace(play.now, request=request)
        self.writing[request] = play

    def _wrote(self, play: Play, rollout: Rollout) -> None:
        assert play.language is not None and rollout.finish in ("stop", "length")
        strand, parsing, stops = play.strand, play.language.parsing, play.language.stops
        message, text = parsing.turn(rollout.ids, strand.ids, stops)
        start, branch = len(strand.tokens), len(play.now.strands) - 1
        said = Said(
            *([message], start, start + len(rollout.ids), True, text, rollout.finish),
            seconds=time.monotonic() - play.since,
            branch=branch,
        )
        wrote = strand.wrote(Draft.of(rollout), rollout.plain_log_probs)
        play.said(said, strands=(*play.now.strands[:-1], wrote))
        self.tell(play, len(play.now.said) - 1)

    def tell(self, play: Play, place: int) -> None:
        """Tell the environment a turn."""
        said = play.now.said[place]
        strand = play.now.strands[said.branch]
        number = sum(earlier.drawn for earlier in play.now.said[:place])
        room = max(0, self.longest - len(strand.prompt_ids) - said.end)
        finish: Literal["stop", "length"] = "length" if said.finish == "length" else "stop"
        ids = strand.tokens[said.start : said.end].tolist()
        if place == len(play.now.said) - 1:
            play.stage = Stage.STEPPING
        self.engine.pool.step(play.number, Turn(said.text, said.messages[0], ids, finish, number, room))

    def _answered(self, play: Play, reply: Stepped) -> None:
        assert play.language is not None
        step = reply.step
        play.last_tools = {name: getattr(reply, name) for name in ("tool_calls", "tool_failures", "unknown_tools")}
        play.logs.update(step.logs)
        play.rewarded(step.reward)
        if step.done:
            self._end(play, "length" if play.now.said[-1].finish == "length" else "stop")
        elif step.truncated:
            self._end(play, "truncated")
        elif play.now.turns >= self.engine.settings.max_turns:
            self._end(play, "turns")
        else:
            self._read(play, step, reply.seconds)

    def _read(self, play: Play, step: Step, seconds: float) -> None:
        """What the environment says, if there is room for it and a token more."""
        assert play.language is not None
        messages, strand, strands = words_of(step, play), play.strand, play.now.strands
        turn = play.now.said[-1]
        ids = step.ids
        if ids is None:
            drawn = strand.tokens[turn.start : turn.end].tolist()
            ids = play.language.behind(strand.ids, drawn, self.conversation(play), messages)
        elif not all(0 <= token < play.language.vocabulary for token in ids):
            raise CannotSay(
                f"Step.ids has tokens that the tokenizer does not have: 0 to {play.language.vocabulary - 1}"
            )
        if ids is not None:
            strands, read = strands[:-1], strand.read(ids)
        else:
            whole = play.language.opening([*self.conversation(play), *messages])
            prompt = strands[0].prompt_ids
            kept = len(prompt) if whole[: len(prompt)] == prompt else 1
            read = Strand.of(prompt if kept > 1 else whole[:1]).read(whole[kept:])
        if read.length + 1 > self.longest:
            self._end(play, "context")
            return
        branch = len(strands)
        start = len(strand.tokens) if branch == turn.branch else 0
        said = Said(messages, start, len(read.tokens), False, seconds=seconds, branch=branch)
        play.said(said, strands=(*strands, read))
        play.count_tools()
        play.next_sampling = step.sampling
        self.write(play)

    def _end(self, play: Play, finish: Finish) -> None:
        play.finish, play.stage = finish, Stage.ENDING
        self.engine.pool.end(play.number)

    def _ended(self, play: Play, reply: Ended) -> None:
        assert play.finish is not None
        play.count_tools()
        play.last_reward = reply.reward
        play.logs.update(reply.logs)
        self.hand_over(play, play.finish)

    def hand_over(self, play: Play, finish: Finish, problem: str | None = None) -> None:
        del self.plays[play.number]
        episode = play.record(problem)
        if finish not in ("abort", "failed"):
            episode.logs |= {
                "turns": float(play.now.turns),
                "episode_length": float(play.strand.length),
                "branches": float(len(play.now.strands)),
            }
        elif finish == "abort" and play.stage in (Stage.WRITING, Stage.STEPPING, Stage.ENDING):
            self.engine.park(play, episode)
        self._finished += play.rollouts(finish, episode, self.sampling.plain_log_probs)

    def _resume(self, play: Play) -> None:
        """In the instance that it had."""
        self.plays[play.number] = play
        if play.stage is Stage.WRITING:
            self.write(play)


def _messages(task: Task) -> list[Message]:
    """The row's prompt."""
    return [{"role": "user", "content": task.prompt}] if isinstance(task.prompt, str) else task.prompt
