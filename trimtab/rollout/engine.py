"""The interface of rollout engines and sessions, and what all of them share. `factory` chooses an engine."""

import math
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol, Self, runtime_checkable

from trimtab.errors import UserError
from trimtab.rollout.episode import Task
from trimtab.rollout.sampling import SamplingParams, check_sampling_params, request_seed
from trimtab.rollout.trajectory import Trajectory, partials_to_run

MIN_CHUNK_SIZE, MAX_CHUNK_SIZE = 8, 24
MAX_CHUNK_SECONDS = 0.05


def decode_chunk_size(most: int | None, *, full: bool = False, seconds: float = math.inf) -> int:
    """Decode steps between two visits of the host, at most `most`, if new requests may arrive meanwhile: so few that
    these start soon. `full`: new ones must wait anyway; `seconds`: of one step, if known."""
    short = full or MAX_CHUNK_SIZE * seconds <= MAX_CHUNK_SECONDS
    usual = MAX_CHUNK_SIZE if short else max(MIN_CHUNK_SIZE, int(MAX_CHUNK_SECONDS / seconds))
    return usual if most is None else min(most, usual)


class Session:
    """Requests that may be added while others run. Close it, or use it in a `with`."""

    def __init__(self) -> None:
        self.meanwhile: Callable[[], None] | None = None
        """Called inside `step` while the device works, if the engine has time to wait. It may add requests."""
        self.requests = 0  # added so far
        self._aborted: set[int] = set()  # requests to abort at the next `step`

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
        """Returns the number of the new request, which is the `prompt` of its trajectories.

        `seed`: of its random streams; `limit`: its own max_new_tokens; `partials`: resume only these samples of it. The
        finished ones contain the partial ones unchanged.
        `task`: the environment's, if there is one. `sampling`: its own parameters instead of the session's.
        """
        raise NotImplementedError

    def expect(self, samples: int) -> None:
        """Announce how many sequences may soon run at once, so that memory is allocated once."""

    def prepare(self, longest: int) -> None:
        """Do slow work (allocation, graph capture) now for unknown requests of mostly at most `longest` tokens."""

    @property
    def has_unfinished(self) -> bool:
        """Whether there are unfinished requests."""
        raise NotImplementedError

    @property
    def full(self) -> bool:
        """Whether a new request must wait for another to finish."""
        return False

    def step(self, steps: int | None = None) -> list[Trajectory]:
        """Run for a moment, or for at most `steps` tokens a sequence; returns what has finished. 0: only prefill new
        requests and sample their first tokens, if the engine can; without new ones, clean up."""
        raise NotImplementedError

    def __iter__(self) -> Iterator[Trajectory]:
        """Trajectories as they finish, until no request is left. More may be added meanwhile, and later."""
        while self.has_unfinished:
            yield from self.step()

    def output_ids(self, request: int) -> list[int]:
        """Tokens so far of the first sample of a running request."""
        raise NotImplementedError

    def output_lengths(self) -> dict[tuple[int, int], int]:
        """How many tokens every unfinished sample has drawn, by request and sample."""
        raise NotImplementedError

    def partials(self) -> dict[int, list[Trajectory]]:
        """Partial rollouts of the unfinished samples of every request. Other threads may call it while the engine
        works, or hangs."""
        raise NotImplementedError

    def new_tokens(self, known: Mapping[int, int]) -> dict[int, Trajectory]:
        """What unfinished requests of one sample have drawn beyond their first `known` tokens, if anything; only the
        built-in engine includes alternatives."""
        partials = self.partials()
        return {
            number: replace(own[0], tokens=own[0].tokens[first:], log_probs=own[0].log_probs[first:])
            for number, first in known.items()
            if (own := partials.get(number)) and len(own[0].tokens) > first
        }

    def abort(self, requests: Collection[int] | None = None) -> None:
        """Stop these requests, or all: they finish as they are, with the reason "abort"."""
        self._aborted.update(range(self.requests) if requests is None else requests)

    def close(self) -> None:
        """Drop unfinished requests."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class TokenSession(Session):
    """A session of an engine that samples tokens itself: it checks requests, and divides them into samples."""

    scores_prompts = False  # whether it returns log-probs of prompts

    def __init__(self, sampling: SamplingParams, *, vocabulary: int, context: int | None, owner: str, tokenizer: Any):
        """`context`: context length of `owner`, the model or the engine."""
        super().__init__()
        self.sampling, self.vocabulary = sampling, vocabulary
        self._context, self._owner, self._tokenizer = context, owner, tokenizer
        if sampling.stop_strings and tokenizer is None:
            raise UserError("stop strings need a tokenizer; give the engine one")

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
        if sampling is not None:
            check_sampling_params(sampling, self.vocabulary, self._tokenizer)
        sampling = self.sampling if sampling is None else sampling
        number, limit = self.requests, sampling.max_new_tokens if limit is None else limit
        scored = sampling.prompt_log_probs is not None
        if scored and not self.scores_prompts:
            raise UserError("log-probs of prompts: only the built-in engine has them; ask without echo or log-probs")
        self._check(number, prompt_ids, limit, 0 if scored else 1)
        seed = request_seed(sampling.seed, number) if seed is None else seed
        assert not (partials and sampling.top_log_probs), "a partial rollout has no alternatives"
        self.add_samples(prompt_ids, partials_to_run(partials, sampling.n, number, limit), seed, limit, sampling)
        self.requests += 1
        return number

    def add_samples(
        self, prompt_ids: list[int], partials: Sequence[Trajectory], seed: int, limit: int, sampling: SamplingParams
    ) -> None:
        """Start the samples of the request with the number `requests`, or resume them."""
        raise NotImplementedError

    def _check(self, number: int, prompt_ids: list[int], limit: int, least: int) -> None:
        if not prompt_ids:
            raise UserError(f"prompt {number} is empty; at least one token is needed")
        if max(prompt_ids) >= self.vocabulary or min(prompt_ids) < 0:
            raise UserError(f"prompt {number} has a token outside the model's vocabulary of {self.vocabulary}")
        if limit < least:
            raise UserError(f"the limit of prompt {number} is {limit}; at least 1 new token is needed")
        if self._context is not None and len(prompt_ids) + limit > self._context:
            raise UserError(
                f"prompt {number} has {len(prompt_ids)} tokens and {limit} may follow, but the {self._owner}'s "
                f"context is {self._context}; shorten the prompt or lower max_new_tokens"
            )


class Engine:
    exact: bool
    """Whether its log-probs are the trainer's own, but for the last bits of fp32."""
    batch_invariant = False
    """Whether they are the same bits whatever else is sampled, and whatever was cached."""
    version: int
    """Version of the weights, as set by the last change; every token carries the one it was drawn with."""
    context: int | None
    """Context length: tokens of a prompt and its answer; None: no known limit."""
    _session: Session | None = None  # the open one

    def session(self, sampling: SamplingParams) -> Session:
        """For requests that are not known beforehand. Later requests use the prefixes of earlier ones."""
        raise NotImplementedError

    def batch_session(self, sampling: SamplingParams) -> Session:
        """The session of one `stream`."""
        return self.session(sampling)

    def generate(self, prompts: Sequence[list[int]], sampling: SamplingParams, **each: Any) -> list[Trajectory]:
        """All trajectories of `stream`, in the order of the prompts and their samples."""
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
        """Trajectories as they finish. Closing the generator ends them.

        For each prompt: `seeds` of its random streams, `limits` (its own max_new_tokens), `tasks` of an environment.
        """
        for name, values in (("seeds", seeds), ("limits", limits), ("tasks", tasks)):
            if values is not None and len(values) != len(prompts):
                raise UserError(f"{len(values)} {name} for {len(prompts)} prompts; one for each is needed")
        with self.batch_session(sampling) as session:
            for index, ids in enumerate(prompts):
                seed, limit = (None if values is None else values[index] for values in (seeds, limits))
                session.add(ids, seed=seed, limit=limit, task=None if tasks is None else tasks[index])
            yield from session

    def abort(self, prompts: Collection[int] | None = None) -> None:
        """Stop these prompts of the running stream, or all: they finish as they are, with the reason "abort"."""
        if self._session is not None:
            self._session.abort(prompts)

    def weights_changed(self, version: int) -> None:
        """New weights, of this version, are used from now on."""

    def sleep(self) -> None:
        """Release memory while the model trains."""

    def trim_memory(self) -> None:
        """Between the calls of a training loop: release memory if little else is free."""

    def wake(self) -> None:
        """Get ready for the next call."""

    def close(self) -> None:
        """End its processes and delete its folders."""

    def session_closed(self) -> None:
        self._session = None

    def check_idle(self, cure: str = "take all its answers first, or close their stream") -> None:
        """Raise UserError if a session is open."""
        if self._session is not None:
            raise UserError(f"the engine is at work already; {cure}")


@runtime_checkable
class ReceivingEngine(Protocol):
    """An engine away from the policy, which receives its weights over links (distributed/weight_transfer.py)."""

    def receivers(self) -> list[dict[str, Any]]:
        """Where its processes are; each of them receives."""

    def connect(self, plan: list[dict[str, Any]]) -> None:
        """Open the links of a plan; those of an earlier one are closed."""

    def receive_weights(self, version: int) -> None:
        """Receive the weights that are being sent at this moment, of this version."""
