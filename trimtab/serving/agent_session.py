"""Agents at work: programs that ask this run's own server for turns, which the engine's open session draws.

start an agent with the address of an endpoint; draw what it asks for; its episode is what was drawn when it ends
"""

from typing import TYPE_CHECKING

from trimtab.agents.around import AroundSession
from trimtab.distributed.watch import pulse
from trimtab.envs.replies import Broken, Ended, Reply
from trimtab.envs.types import Task
from trimtab.rollout.types import Draft, Finish, Rollout, Sampling
from trimtab.serving.records import Record
from trimtab.serving.visit import Visit

if TYPE_CHECKING:
    from trimtab.serving.agent_engine import ServedAgents

LOOK_EVERY = 0.005  # seconds, where only agents are waited for


class ServedSession(AroundSession[Visit]):
    def __init__(self, engine: "ServedAgents", sampling: Sampling):
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
        record = Record(seed, self.engine.settings.max_turns, self.sampling)
        self.engine.server.records.open(session, record)
        visit = Visit(number, request, seed, task, prompt_ids, session, record, begun, failures)
        self.under_way[number] = visit
        self.engine.run(visit)

    def _take(self, visit: Visit, reply: Reply) -> None:
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

    def _failed(self, visit: Visit, words: str) -> None:
        if visit.failures < self.engine.settings.retries:
            self._again(visit, visit.failures + 1)
            return
        self._hand_over(visit, "failed", words)
        for other in [other for other in self.under_way.values() if other.request == visit.request]:
            self._hand_over(other, "failed")

    def _again(self, visit: Visit, failures: int) -> None:
        self._leave(visit)
        self._start(visit.request, visit.seed, visit.task, visit.prompt_ids, visit.begun + 1, failures)

    def _hand_over(self, visit: Visit, finish: Finish, problem: str | None = None) -> None:
        self._leave(visit)
        rollouts = visit.rollouts(finish, problem)
        if finish != "failed":
            last = rollouts[-1]
            assert last.episode is not None, "they have one"
            length, turns = float(len(last.prompt_ids) + len(last.tokens)), float(len(last.episode.turns))
            last.episode.logs |= {"turns": turns, "episode_length": length, "branches": float(len(rollouts))}
        self._finished += rollouts

    def _leave(self, visit: Visit) -> None:
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
