"""What every rollout engine can do. Loops know this and `types`; which engine is behind it is the caller's choice."""

import math
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from types import TracebackType
from typing import Any, Protocol, Self, runtime_checkable

from trimtab.errors import UserError
from trimtab.rollout.episode import Task
from trimtab.rollout.sampling import SamplingParams
from trimtab.rollout.trajectory import Trajectory

MIN_CHUNK_SIZE, MAX_CHUNK_SIZE = 8, 24
MAX_CHUNK_SECONDS = 0.05


def decode_chunk_size(most: int | None, *, full: bool = False, seconds: float = math.inf) -> int:
    """How many steps to draw at a time, at most `most`, where somebody outside may ask for more meanwhile: nobody waits
    long for a place, and a place is not empty for long. `full`: who comes must wait for one anyway; `seconds`: that a
    step takes, where somebody knows: of short ones there are more."""
    short = full or MAX_CHUNK_SIZE * seconds <= MAX_CHUNK_SECONDS
    usual = MAX_CHUNK_SIZE if short else max(MIN_CHUNK_SIZE, int(MAX_CHUNK_SECONDS / seconds))
    return usual if most is None else min(most, usual)


@runtime_checkable
class Session(Protocol):
    """Requests that are added while others run; to be closed, or used in a `with`."""

    meanwhile: Callable[[], None] | None
    """What the host may do inside `advance`, while a device draws what was asked of it before. Requests may be added
    there; who has nothing to wait for never calls it."""

    def add(
        self,
        prompt_ids: list[int],
        *,
        seed: int | None = None,
        limit: int | None = None,
        partials: Sequence[Trajectory] | None = None,
        task: Task | None = None,
        sampling: SamplingParams | None = None,
    ) -> int:
        """The number of the new request, which its rollouts carry as their `prompt`.

        `seed`: of its random streams; `limit`: its own max_new_tokens; `partials`: resume only these samples of it. The
        finished ones contain the partial ones unchanged.
        `task`: what an environment is to open; who answers prompts has no use for it. `sampling`: its own setting
        in place of the session's; what others are drawn by changes nothing.
        """

    def expect(self, samples: int) -> None:
        """So many may be at work at once before long: whoever needs memory for each makes it in one go."""

    def prepare(self, longest: int) -> None:
        """Requests will come that nobody knows yet, most of them of at most so many tokens with their answers. What
        would take time in the middle of them is done now."""

    @property
    def busy(self) -> bool:
        """Whether requests are still unanswered."""

    @property
    def full(self) -> bool:
        """Whether there is somebody for every place: who is added now begins when another has finished."""

    def advance(self, steps: int | None = None) -> list[Trajectory]:
        """Work on for a moment, or for at most so many tokens a sample, and hand over what has finished. 0: read what
        is new (and draw its first token), and no more, where that can be; with nothing new, tidy up."""

    def __iter__(self) -> Iterator[Trajectory]:
        """Answers as they finish, until there is no request left. More may be added on the way, and later."""

    def drawn(self, request: int) -> list[int]:
        """The first sample's tokens so far, of a request at work."""

    def at_work(self) -> dict[tuple[int, int], int]:
        """The tokens that were drawn of every unfinished sample so far, by request and sample."""

    def partials(self) -> dict[int, list[Trajectory]]:
        """What the unfinished samples of every request have so far. It may be asked from another thread, too, while
        the engine works, or hangs."""

    def abort(self, requests: Collection[int] | None = None) -> None:
        """Stop the answers to these requests, or all: they come as they are, finished by "abort"."""

    def close(self) -> None:
        """Give up what is not answered."""

    def __enter__(self) -> "Session": ...

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None: ...


@runtime_checkable
class Engine(Protocol):
    @property
    def exact(self) -> bool:
        """Whether the log-probs of what it draws are the trainer's own, but for the last bits of fp32."""

    @property
    def version(self) -> int:
        """Of the weights, as whoever changed them last has told; every token carries the one it was drawn from."""

    @property
    def context(self) -> int | None:
        """Tokens of the longest prompt with its answer; None: no limit is known."""

    def generate(
        self,
        prompts: Sequence[list[int]],
        sampling: SamplingParams,
        *,
        seeds: Sequence[int] | None = None,
        limits: Sequence[int] | None = None,
        tasks: Sequence[Task] | None = None,
    ) -> list[Trajectory]:
        """All answers, in the order of the prompts and their samples.

        `seeds`: one for each prompt, from which its samples draw; `limits`: each prompt's own max_new_tokens;
        `tasks`: each prompt's, where an environment is played.
        """

    def stream(
        self,
        prompts: Sequence[list[int]],
        sampling: SamplingParams,
        *,
        seeds: Sequence[int] | None = None,
        limits: Sequence[int] | None = None,
        tasks: Sequence[Task] | None = None,
    ) -> Generator[Trajectory]:
        """The same answers as they finish; to close it ends them."""

    def session(self, sampling: SamplingParams) -> Session:
        """The same for requests that are not known beforehand. What an earlier request has read is not read twice."""

    def abort(self, prompts: Collection[int] | None = None) -> None:
        """Stop answers to these prompts of the stream at work, or all: they come as they are, finished by "abort"."""

    def weights_changed(self, version: int) -> None:
        """Answers come from other weights from now on, called by this number."""

    def sleep(self) -> None:
        """Give memory back while the model trains."""

    def rest(self) -> None:
        """Between the calls of a training loop: give memory back if little else is free."""

    def wake(self) -> None:
        """Be ready for the next call."""

    def close(self) -> None:
        """Let go of processes and folders of its own."""


@runtime_checkable
class ReceivingEngine(Engine, Protocol):
    """One that is not where the policy is: its weights are sent to it (distributed/link.py)."""

    def seats(self) -> list[dict[str, Any]]:
        """Where its processes are, each of which receives."""

    def join(self, plan: list[dict[str, Any]]) -> None:
        """Open the links of a plan; those of an earlier one are closed."""

    def receive(self, version: int) -> None:
        """Take the weights that are being sent at this moment, called by this number."""


# ---- What engines and sessions have in common: whoever has an open session can answer many prompts at once with it.


AT_WORK = "the engine is at work already; take all its answers first, or close their stream"


class BaseEngine:
    """Prompts that are known beforehand, from an engine that opens sessions."""

    def session(self, sampling: SamplingParams) -> Session:
        raise NotImplementedError

    def batch_session(self, sampling: SamplingParams) -> Session:
        """For prompts that come all at once."""
        return self.session(sampling)

    def generate(self, prompts: Sequence[list[int]], sampling: SamplingParams, **each: Any) -> list[Trajectory]:
        rollouts = list(self.stream(prompts, sampling, **each))
        return sorted(rollouts, key=lambda r: (r.prompt, r.sample, r.branch))

    def stream(
        self,
        prompts: Sequence[list[int]],
        sampling: SamplingParams,
        *,
        seeds: Sequence[int] | None = None,
        limits: Sequence[int] | None = None,
        tasks: Sequence[Task] | None = None,
    ) -> Generator[Trajectory]:
        for name, values in (("seeds", seeds), ("limits", limits), ("tasks", tasks)):
            if values is not None and len(values) != len(prompts):
                raise UserError(f"{len(values)} {name} for {len(prompts)} prompts; one for each is needed")
        with self.batch_session(sampling) as session:
            for index, ids in enumerate(prompts):
                seed, limit = (None if values is None else values[index] for values in (seeds, limits))
                session.add(ids, seed=seed, limit=limit, task=None if tasks is None else tasks[index])
            yield from session


class BaseSession(Session):
    """A session is gone through until nothing is left in it, and closed at the end of a `with`."""

    def __init__(self) -> None:
        self.meanwhile: Callable[[], None] | None = None
        self.requests = 0  # added so far
        self._aborted: set[int] = set()  # requests that somebody has had enough of

    def expect(self, samples: int) -> None:
        """Nothing to prepare."""

    def prepare(self, longest: int) -> None:
        """Nothing to prepare."""

    @property
    def full(self) -> bool:
        return False

    def abort(self, requests: Collection[int] | None = None) -> None:
        self._aborted.update(range(self.requests) if requests is None else requests)

    def __iter__(self) -> Iterator[Trajectory]:
        while self.busy:
            yield from self.advance()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
