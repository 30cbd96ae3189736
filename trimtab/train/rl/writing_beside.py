"""A thread that writes all the time, also while the policy learns: for engines with processes of their own.

Whoever asks for something waits at most for the moment at which the thread looks up, between two tokens. To give the
engine to others (new weights, evaluation) the thread sets everything down; or it first ends what it has begun.
"""

import threading
import time

from trimtab.distributed.supervision import pulse
from trimtab.errors import OutOfMemory
from trimtab.rollout.sampling import SamplingParams
from trimtab.train.pass_limit import memory_guard
from trimtab.train.rl.answers import Admission, Collected, UnderWay, Wait
from trimtab.train.rl.writing import LOOK_EVERY, Writing

TO_END = 5.0  # seconds for the thread when all is over


class WritingBeside:
    """Like Writing, but `collect` only waits, and nothing is written before the first `go_on`. What goes wrong in the
    thread is raised where something is asked."""

    def __init__(self, writing: Writing):
        self._writing = writing
        self._news = writing.judging.news
        self._paused = True  # wishes
        self._drained = self._closed = False
        self._idle = True  # the engine is nobody's
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name="writing", daemon=True)

    # ---- what the loop asks

    def admit(self, admission: Admission, sampling: SamplingParams) -> None:
        with self._news:
            self._writing.admit(admission, sampling)
            if self._thread.ident is None:
                self._thread.start()
            self._news.notify_all()

    def collect(self, seconds: float | None = None, *, at_once: bool = True) -> Collected | None:
        deadline = None if seconds is None else time.monotonic() + seconds
        with pulse.waiting(), self._news:  # the loop has a limit for it
            while not self._enough(deadline):
                self._news.wait(LOOK_EVERY)
        self._check()
        return self._writing.handed_over()

    def _enough(self, deadline: float | None) -> bool:
        writing, late = self._writing, deadline is not None and time.monotonic() >= deadline
        return late or writing.ready or self._failure is not None or writing.empty or writing.stopped()

    def pause(self, *, drained: bool = False, seconds: float | None = None) -> bool:
        """`drained`: what was begun ends first. Whether the engine is free by now: after so many seconds it may not be,
        and can be asked for again."""
        with self._news:
            self._paused, self._drained = True, drained
            self._news.notify_all()
            free = self._news.wait_for(lambda: self._idle, seconds)
        if not isinstance(self._failure, OutOfMemory):  # after which the engine is free
            self._check()
        return free

    def go_on(self) -> None:
        with self._news:
            self._paused = False
            self._news.notify_all()

    def unfinished(self) -> list[UnderWay]:
        return self._writing.unfinished()

    def waits(self) -> list[Wait]:
        return self._writing.waits()

    def abandon(self) -> None:
        """The thread has done so before it told of its failure."""

    def close(self) -> None:
        with self._news:
            self._closed = True
            self._news.notify_all()
        if self._thread.ident is not None:
            self._thread.join(TO_END)
        if not self._thread.is_alive() and self._failure is None:  # else the session is in use, or cannot be spoken to
            self._writing.close()

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    # ---- the thread

    def _work(self) -> None:
        try:
            with memory_guard():
                while (pausing := self._next_wish()) is not None:
                    if not pausing:
                        self._writing.advance()
                    else:
                        self._set_down()
        except OutOfMemory as shortage:
            self._writing.abandon()
            self._fail(shortage)
        except BaseException as error:
            self._fail(error)

    def _next_wish(self) -> bool | None:
        """When there is something to do: whether that is to pause. None: all is over."""
        with self._news:
            if not self._has_work():
                pulse.rest()
                self._news.wait_for(self._has_work)
            if self._closed:
                return None
            if not self._paused:
                self._idle = False
            return self._paused

    def _has_work(self) -> bool:
        return self._closed or (not self._idle if self._paused else self._writing.busy)

    def _set_down(self) -> None:
        if self._drained:
            self._writing.withdraw()
            while self._writing.begun and self._paused and self._drained and not self._closed:
                self._writing.advance(begin=False)
            if not self._paused:
                return
        self._writing.pause()
        with self._news:
            pulse.rest()
            self._idle = True
            self._news.notify_all()

    def _fail(self, error: BaseException) -> None:
        with self._news:
            self._failure, self._idle = error, True
            self._news.notify_all()
