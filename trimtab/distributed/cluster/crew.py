"""All processes of a run on Ray: who they are, how they are, and how calls to them are waited for.

Every wait has an end. While one waits, all processes are asked how they are, each in a thread of its own beside its
work: a dead one is named at once, one that stands still or does not answer after --hang_timeout. Neighbours of a dead
process complain of broken connections first, so before anybody is blamed all are asked once more.
"""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any, NoReturn

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from trimtab.distributed.cluster.losses import EngineLost, Lost, in_words, is_of_another
from trimtab.distributed.cluster.member import Member
from trimtab.distributed.watch import GRACE
from trimtab.errors import RunFailed, UserError
from trimtab.interrupts import StopRequest

LOOK_EVERY = 0.5  # seconds
ASK_EVERY = 3.0
TO_BLAME = 8.0  # seconds in which a dead process is found out, once something is wrong
TO_LEAVE = 10.0


class Crew:
    def __init__(self, hang_timeout: float, stop: StopRequest, world_size: int):
        """`world_size`: how many of the members, the first ones, compute together."""
        self.members: list[Member] = []
        self.hang_timeout, self.stop, self.world_size = hang_timeout, stop, world_size
        self._told: int | None = None
        self._asked: dict[int, tuple[Any, float]] = {}  # rank: the question under way, and since when
        self._next_question = 0.0

    def wait(self, of: Sequence[tuple[Member, Any]], take: Callable[[Member, Any], None], seconds: float | None) -> int:
        """Hand over every result as it comes; how many are missing after so many seconds."""
        deadline = None if seconds is None else time.monotonic() + seconds
        waiting = {reference: member for member, reference in of}
        while waiting:
            left = LOOK_EVERY if deadline is None else min(LOOK_EVERY, max(0.0, deadline - time.monotonic()))
            done, _ = ray.wait([*waiting], num_returns=len(waiting), timeout=left)
            for reference in done:
                member = waiting.pop(reference)
                try:
                    result = ray.get(reference)
                except RayTaskError as error:
                    self._pass_on(member, error)
                except RayError as error:
                    self.blame(member, error)
                take(member, result)
            if waiting:
                self.look({member.rank for member in waiting.values()})
                if deadline is not None and time.monotonic() >= deadline:
                    break
        return len(waiting)

    def call(self, method: str, *arguments: Any, seconds: float, members: Sequence[Member] | None = None) -> list[Any]:
        """The same of all or of these, in their order; one that is late is lost."""
        members = self.members if members is None else members
        calls = [(member, getattr(member.handle, method).remote(*arguments)) for member in members]
        results: dict[int, Any] = {}
        self.wait(calls, lambda member, result: results.update({member.rank: result}), seconds)
        for member in members:
            if member.rank not in results:
                raise member.lost(f"has not answered for {seconds:g} s ({method})")
        return [results[member.rank] for member in members]

    def one(self, member: Member, reference: Any, seconds: float) -> Any:
        """What one member answers."""
        results: list[Any] = []
        if self.wait([(member, reference)], lambda _, result: results.append(result), seconds):
            raise member.lost(f"has not answered for {seconds:g} s")
        return results[0]

    # ---- how they are

    def look(self, needed: Collection[int]) -> None:
        """Pass a signal on, and notice who is dead, stands still or does not answer. An engine matters only while it is
        needed: until then its loss is no loss."""
        if self.stop.signal is not None and self._told is None:
            self._told = self.stop.signal
            for member in self.members:
                member.handle.hear.remote(self._told)
        now = time.monotonic()
        if now >= self._next_question:
            self._next_question = now + ASK_EVERY
            for member in self.members:
                if member.rank not in self._asked:
                    self._asked[member.rank] = member.handle.beat.remote(), now
        answered, _ = ray.wait([ask for ask, _ in self._asked.values()], num_returns=len(self._asked), timeout=0)
        for member in self.members:
            try:
                self._hear_from(member, answered)
            except EngineLost:
                if member.rank in needed:
                    raise

    def _hear_from(self, member: Member, answered: list[Any]) -> None:
        question, since = self._asked.get(member.rank, (None, 0.0))
        if question is None:
            return
        if question not in answered:
            if time.monotonic() - since > self.hang_timeout:
                member.silent = True
                raise member.lost(f"has given no sign of life for {self.hang_timeout:g} s (--hang_timeout)")
            return
        del self._asked[member.rank]
        try:
            doing, still, waits = ray.get(question)
        except RayError as error:
            self.blame(member, error)
        if still > self.hang_timeout * (1 + GRACE if waits else 1):
            why = "waits for a process that does not come" if waits else "hangs"
            raise member.lost(f"{why}: {doing} has not moved for {self.hang_timeout:g} s (--hang_timeout)")

    def _pass_on(self, member: Member, error: RayTaskError) -> NoReturn:
        """What a member has raised."""
        if isinstance(error.cause, UserError):
            raise UserError(str(error.cause)) from error
        self.blame_somebody(member, f"{type(error.cause).__name__}: {error.cause}")

    def answers(self, member: Member) -> bool:
        """Whether it is alive, asked once."""
        try:
            ray.get(member.handle.beat.remote(), timeout=TO_BLAME)
        except RayError:
            return False
        return True

    def tell(self, member: Member) -> None:
        """One that came later hears what the others were told."""
        if self._told is not None:
            member.handle.hear.remote(self._told)

    def blame(self, member: Member, error: RayError) -> NoReturn:
        """A call to a member has failed: it is gone."""
        raise member.lost(in_words(error)) from error

    def blame_somebody(self, member: Member, message: str) -> NoReturn:
        """A member has failed, by its own fault or since another one is gone."""
        if is_of_another(message):
            self._find_the_dead()
        raise RunFailed(f"{member}: {message}")

    def _find_the_dead(self) -> None:
        """Nobody may be: then it takes all the time that there is."""
        deadline = time.monotonic() + TO_BLAME
        while (left := deadline - time.monotonic()) > 0:
            asked = {member.handle.beat.remote(): member for member in self.members}
            answered, silent = ray.wait([*asked], num_returns=len(asked), timeout=left)
            for question in answered:
                try:
                    ray.get(question)
                except RayError as error:
                    self.blame(asked[question], error)
            if silent:
                asked[silent[0]].silent = True
                raise asked[silent[0]].lost(f"was lost: it has not answered for {TO_BLAME:g} s")
            time.sleep(LOOK_EVERY)

    # ---- the end

    def end(self, *, kindly: bool) -> None:
        """`kindly`: they may close what they hold."""
        if kindly:
            try:
                self.call("leave", seconds=TO_LEAVE)
            except (Lost, RayError):
                for member in self.members:
                    member.silent = member.silent or not self.answers(member)
        for member in self.members:
            self.kill(member)
        # Ray only passes the wish on: whoever leaves before it has come true may leave processes behind.
        asked = [member.handle.beat.remote() for member in self.members]
        if asked:
            ray.wait(asked, num_returns=len(asked), timeout=TO_LEAVE)
        self.members = []

    def kill(self, member: Member) -> None:
        """Also one that is stopped, to which Ray's own way does nothing."""
        ray.kill(member.handle)
        self._asked.pop(member.rank, None)
        if member.silent and member.process is not None and member.node_id is not None:
            there = NodeAffinitySchedulingStrategy(member.node_id, soft=False)
            end = ray.remote(num_cpus=0, max_retries=0, scheduling_strategy=there)(_end)
            with contextlib.suppress(RayError):
                ray.get(end.remote(member.process), timeout=TO_LEAVE)
            member.silent = False


def _end(process: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, signal.SIGKILL)
