"""Which samples run, which wait, and which make room. Knows pages and lengths, no tensors and no model.

A prompt's pages are filled once and shared by its samples: whole pages as they are, a last half-filled one copied. When
pages run out, the sample that was admitted last gives up its own and waits to be read again; nothing it drew is lost.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from trimtab.errors import UserError
from trimtab.rollout.builtin.pages import PagePool


@dataclass(eq=False)
class Prompt:
    index: int
    ids: list[int]
    waiting: int  # samples not yet admitted
    pages: list[int] = field(default_factory=list)  # held while samples wait; empty: not read yet, or let go


@dataclass(eq=False)
class Sample:
    prompt: Prompt
    number: int
    seed: int
    limit: int  # new tokens at most
    ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    plain_log_probs: list[float] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)

    @property
    def length(self) -> int:
        """Tokens whose keys and values are in the cache while it runs: all but the newest."""
        return len(self.prompt.ids) + max(0, len(self.ids) - 1)

    @property
    def remaining(self) -> int:
        return self.limit - len(self.ids)


@dataclass
class Admission:
    """A sample that may run now, and what must be done first."""

    sample: Sample
    read_from: int  # first token whose keys and values are not in its pages yet
    copy: tuple[int, int] | None = None  # (from page, to page)
    read_prompt: bool = False  # its prompt's own pages must be filled first


class Scheduler:
    def __init__(self, pool: PagePool, slots: int):
        self.pool, self.slots = pool, slots
        self.waiting: deque[Sample] = deque()
        self.running: list[Sample] = []
        self._to_release: list[Prompt] = []

    def add(self, samples: list[Sample]) -> None:
        self.waiting.extend(samples)

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.running)

    def admit(self, most: int | None = None) -> list[Admission]:
        """Samples that fit now, in order, at most `most`."""
        admitted: list[Admission] = []
        while self.waiting and len(self.running) < self.slots and (most is None or len(admitted) < most):
            admission = self._admit_one(self.waiting[0])
            if admission is None:
                break
            self.waiting.popleft()
            self.running.append(admission.sample)
            admitted.append(admission)
        if not self.running and self.waiting:
            self._release_prompts(keep=None)
            raise UserError(
                f"the KV memory of {self.pool.total * self.pool.size} tokens cannot hold one sequence of "
                f"{self.waiting[0].length + 1} tokens; give the engine more memory"
            )
        return admitted

    def _admit_one(self, sample: Sample) -> Admission | None:
        prompt, size = sample.prompt, self.pool.size
        length = len(prompt.ids)
        read_prompt = not prompt.pages
        if read_prompt:
            pages = self._take(self.pool.needed(length), keep=prompt)
            if pages is None:
                return None
            prompt.pages = pages
        whole, rest = divmod(length, size)
        own = self._take(self.pool.needed(sample.length + 1) - whole, keep=prompt)
        if own is None:
            if read_prompt:  # nothing was read yet, so nothing is lost
                self.pool.give_back(prompt.pages)
                prompt.pages = []
            return None
        self.pool.share(prompt.pages[:whole])
        sample.pages = prompt.pages[:whole] + own
        copy = (prompt.pages[whole], own[0]) if rest else None
        prompt.waiting -= 1
        admission = Admission(sample, length, copy, read_prompt)
        if prompt.waiting == 0:
            self._to_release.append(prompt)
        return admission

    def settled(self) -> None:
        """The admitted samples have been read and copied: prompts that nobody waits for let their pages go."""
        for prompt in self._to_release:
            self.pool.give_back(prompt.pages)
            prompt.pages = []
        self._to_release.clear()

    def make_room(self, steps: int) -> list[Sample]:
        """Pages for the next tokens of everything that runs; the samples that had to stop for it."""
        stopped: list[Sample] = []
        for sample in list(self.running):
            while sample not in stopped:
                missing = self._missing(sample, steps)
                if missing <= 0:
                    break
                pages = self._take(missing, keep=None)
                if pages is not None:
                    sample.pages += pages
                    break
                last = self.running[-1]
                self._stop(last)
                stopped.append(last)
        return stopped

    def has_room(self, steps: int) -> bool:
        """Whether everything that runs can go on for so many tokens without anybody's stopping."""
        return sum(max(0, self._missing(sample, steps)) for sample in self.running) <= self.pool.free

    def _missing(self, sample: Sample, steps: int) -> int:
        """Pages for the next tokens of a running sample that it does not hold yet."""
        drawn = len(sample.ids)
        ahead = min(steps, sample.limit - drawn)
        return -(-(len(sample.prompt.ids) + drawn - 1 + ahead) // self.pool.size) - len(sample.pages)

    def finish(self, sample: Sample) -> None:
        self.running.remove(sample)
        self.pool.give_back(sample.pages)
        sample.pages = []

    def abort(self, unwanted: Callable[[Sample], bool]) -> list[Sample]:
        """Take samples out for good, whether they run or wait."""
        running = [sample for sample in self.running if unwanted(sample)]
        waiting = [sample for sample in self.waiting if unwanted(sample)]
        for sample in running:
            self.finish(sample)
        self.waiting = deque(sample for sample in self.waiting if not unwanted(sample))
        for sample in waiting:
            sample.prompt.waiting -= 1
            if sample.prompt.waiting == 0:
                self._to_release.append(sample.prompt)
        self.settled()
        return running + waiting

    def _stop(self, sample: Sample) -> None:
        self.finish(sample)
        sample.prompt.waiting += 1
        self.waiting.appendleft(sample)

    def _take(self, count: int, keep: Prompt | None) -> list[int] | None:
        pages = self.pool.take(count)
        if pages is None:
            self._release_prompts(keep)
            pages = self.pool.take(count)
        return pages

    def _release_prompts(self, keep: Prompt | None) -> None:
        """Prompts can be read again: those that only wait give their pages up first."""
        for sample in self.waiting:
            prompt = sample.prompt
            if prompt.pages and prompt is not keep and prompt not in self._to_release:
                self.pool.give_back(prompt.pages)
                prompt.pages = []
