"""Episodes at work: turns are drawn in the engine's open session while environments answer others.

open an instance; draw a turn, give it to the environment, read what it says; repeat until it is over, or a limit is met
"""

from dataclasses import replace
from typing import TYPE_CHECKING

from trimtab.agents.around import AroundSession
from trimtab.agents.language import CannotSay, Language
from trimtab.agents.mishaps import Mishaps
from trimtab.agents.play import Moment, Play, Stage, Strand
from trimtab.agents.replaying import Replaying
from trimtab.agents.turns import Turns
from trimtab.distributed.watch import pulse
from trimtab.envs.replies import Broken, Ended, Opened, Reply
from trimtab.envs.types import Task
from trimtab.rollout.engine import steps_among_others
from trimtab.rollout.sampling import Sampling
from trimtab.rollout.trajectory import Draft, Finish, Rollout

if TYPE_CHECKING:
    from trimtab.agents.engine import AgentEngine

LOOK_EVERY = 0.05  # seconds, where only environments are waited for
NO_LIMIT = 2**31


class AgentSession(AroundSession[Play]):
    def __init__(self, engine: "AgentEngine", sampling: Sampling):
        super().__init__(engine, sampling)
        self.engine = engine
        most = engine.settings.episode_max_len, engine.context
        self.longest = min((limit for limit in most if limit is not None), default=NO_LIMIT)
        self.writing: dict[int, Play] = {}  # by the inner session's requests
        self.turns, self.replaying, self.mishaps = Turns(self), Replaying(self), Mishaps(self)
        self._prompts: dict[int, list[int]] = {}  # of every request, for its samples to share
        self.inner.meanwhile = self._hear

    # ---- what callers do

    def begin(
        self, request: int, seed: int, task: Task, prompt_ids: list[int], limit: int, drafts: list[Draft]
    ) -> None:
        if (parked := self.engine.unpark(drafts[0].episode)) is not None:
            parked.request, parked.limit = request, limit
            self._resume(parked)
            return
        play = Play(next(self.engine.numbers), request, seed, task, prompt_ids, limit)
        play.restore(drafts)
        self.open(play)

    def advance(self, steps: int | None = None) -> list[Rollout]:
        pulse.move()
        aborted, self._aborted = self._aborted, set()
        self.mishaps.abort(aborted)
        if self.inner.busy and not self._finished:
            if len(self.under_way) > len(self.writing):  # an environment may answer meanwhile
                steps = steps_among_others(steps, full=self.inner.full)
            for rollout in self.inner.advance(steps):
                if (play := self.writing.pop(rollout.prompt, None)) is not None:
                    self.turns.wrote(play, rollout)
        if self.under_way:
            self._hear(0.0 if self.inner.busy or self._finished else LOOK_EVERY)
        return self.take_finished()

    def _hear(self, seconds: float = 0.0) -> None:
        """Take what environments have answered, or answer within so many seconds."""
        with pulse.waiting():  # an environment has a limit of its own
            replies = self.engine.replies(seconds)
        for reply in replies:
            if (play := self.under_way.get(reply.episode)) is not None:
                self._take(play, reply)

    def drawn(self, request: int) -> list[int]:
        play = next((p for p in self.under_way.values() if (p.request, p.sample) == (request, 0)), None)
        if play is None or not play.now.strands:
            return []
        inner = [] if play.now.request is None else self.inner.drawn(play.now.request)
        return play.strand.tokens.tolist() + inner

    def at_work(self) -> dict[tuple[int, int], int]:
        inner = self.inner.at_work()
        found = {}
        for play in list(self.under_way.values()):
            now = play.now
            drawn = sum(len(strand.log_probs) for strand in now.strands)
            part = 0 if now.part is None else len(now.part.tokens)
            more = part if now.request is None else inner.get((now.request, 0), part)
            found[play.request, play.sample] = drawn + more
        return found

    def drafts(self) -> dict[int, list[Draft]]:
        inner = self.inner.drafts()
        found: dict[int, list[Draft]] = {}
        for play in list(self.under_way.values()):
            now = play.now
            parts = [] if now.request is None else inner.get(now.request, [])
            found.setdefault(play.request, []).extend(play.drafts(parts[0] if parts else None, now))
        return found

    def close(self) -> None:
        self.inner.close()
        for number in self.under_way:
            self.engine.pool.drop(number)
        self.under_way.clear()
        self.engine.give_up(self.to_resume)
        self.engine.ended()

    # ---- one episode

    def open(self, play: Play) -> None:
        self.under_way[play.number] = play
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
                self.turns.answered(play, reply)
        except CannotSay as error:
            self.engine.pool.drop(play.number)
            self.mishaps.broken(play, Broken(play.number, str(error)))

    def _opened(self, play: Play, reply: Opened) -> None:
        play.language = language = self.engine.language(reply.tools, self.sampling.stop_token_ids)
        prompt = self._shared(play.request, opening(language, reply, play.task, play.prompt_ids))
        if not play.now.strands:
            play.opening, play.now = reply.messages, Moment((Strand.of(prompt),))
            self.turns.write(play)
        elif reply.messages != play.opening:
            self.replaying.begin_anew(play)
        else:
            play.now = replace(play.now, strands=self.replaying.with_prompts(play, prompt))
            self.replaying.go_on(play)

    def _shared(self, request: int, prompt: list[int]) -> list[int]:
        known = self._prompts.setdefault(request, prompt)
        return known if known == prompt else prompt

    def end(self, play: Play, finish: Finish) -> None:
        play.finish, play.stage = finish, Stage.ENDING
        self.engine.pool.end(play.number)

    def _ended(self, play: Play, reply: Ended) -> None:
        assert play.finish is not None
        play.count_tools()
        play.last_reward = reply.reward
        play.logs.update(reply.logs)
        self.hand_over(play, play.finish)

    def hand_over(self, play: Play, finish: Finish, problem: str | None = None) -> None:
        del self.under_way[play.number]
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
        self.under_way[play.number] = play
        if play.stage is Stage.WRITING:
            self.turns.write(play)


def opening(language: Language, reply: Opened, task: Task, prompt_ids: list[int]) -> list[int]:
    """What an episode begins with: the environment's words, or the row's prompt, of which a template writes the tools
    beside it."""
    first = task.asked if reply.messages is None and reply.tools else reply.messages
    prompt = prompt_ids if first is None else language.opening(first)
    if not prompt:
        raise CannotSay("an episode begins with no tokens at all: reset and the row's prompt are empty")
    return prompt
