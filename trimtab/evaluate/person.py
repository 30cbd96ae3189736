"""A person in the place of a model: an engine whose tokens are what somebody types.

So an environment is played with the same code, token by token, as in training. Nothing is known of a person's
probabilities: their log-probs are 0.
"""

from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from types import TracebackType

import numpy as np
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from trimtab.data.byte_tokenizer import END, byte_tokenizer
from trimtab.envs.types import Task
from trimtab.rollout.types import Draft, Finish, Rollout, Sampling

TEMPLATE = (
    "{%- for tool in tools or [] -%}{{ tool.function.name }}: {{ tool.function.description }}\n{% endfor -%}"
    "{%- for message in messages -%}{{ message.content or '' }}"
    "{%- for call in message.tool_calls or [] -%}{{ call.function.name }} {{ call.function.arguments | tojson }}"
    "{%- endfor -%}"
    "{%- if message.role == 'assistant' -%}" + END + "{%- endif -%}\n{% endfor -%}"
)


def tokenizer_of_a_person() -> PreTrainedTokenizerFast:
    """For one who plays without a model."""
    return byte_tokenizer(TEMPLATE)


class Person:
    """`ask` gives what is said next; what it raises passes through."""

    exact = True
    version = 0
    context = None

    def __init__(self, tokenizer: PreTrainedTokenizerBase, ask: Callable[[], str]):
        self.tokenizer, self.ask = tokenizer, ask

    def session(self, sampling: Sampling) -> "PersonSession":
        return PersonSession(self, sampling)

    def generate(
        self,
        prompts: Sequence[list[int]],
        sampling: Sampling,
        *,
        seeds: Sequence[int] | None = None,
        limits: Sequence[int] | None = None,
        tasks: Sequence[Task] | None = None,
    ) -> list[Rollout]:
        return list(self.stream(prompts, sampling, limits=limits))

    def stream(
        self,
        prompts: Sequence[list[int]],
        sampling: Sampling,
        *,
        seeds: Sequence[int] | None = None,
        limits: Sequence[int] | None = None,
        tasks: Sequence[Task] | None = None,
    ) -> Generator[Rollout]:
        with self.session(sampling) as session:
            for place, prompt in enumerate(prompts):
                session.add(prompt, limit=limits[place] if limits else None)
            yield from session

    def abort(self, prompts: Collection[int] | None = None) -> None: ...

    def weights_changed(self, version: int) -> None: ...

    def sleep(self) -> None: ...

    def rest(self) -> None: ...

    def wake(self) -> None: ...

    def close(self) -> None: ...


class PersonSession:
    """Requests wait for a moment before somebody is asked, so that what they say is seen first."""

    def __init__(self, person: Person, sampling: Sampling):
        self.person, self.sampling = person, sampling
        self._new: list[int] = []
        self._waiting: dict[int, tuple[list[int], int]] = {}  # prompt and limit
        self._added = 0

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
        assert drafts is None, "nobody is asked to go on in the middle of a word"
        request, self._added = self._added, self._added + 1
        self._new.append(request)
        self._waiting[request] = (prompt_ids, limit or (sampling or self.sampling).max_new_tokens)
        return request

    @property
    def busy(self) -> bool:
        return bool(self._waiting)

    def advance(self, steps: int | None = None) -> list[Rollout]:
        asked = [request for request in self._waiting if request not in self._new][:1]
        self._new.clear()
        return [self._answer(request) for request in asked]

    def _answer(self, request: int) -> Rollout:
        said = self.person.ask()
        prompt, limit = self._waiting.pop(request)
        ids = self.person.tokenizer.encode(said, add_special_tokens=False)
        end = self.person.tokenizer.eos_token_id
        tokens = np.array((ids if end is None else [*ids, end])[:limit], dtype=np.int32)
        finish: Finish = "length" if len(ids) >= limit else "stop"
        versions = np.zeros(len(tokens), dtype=np.int32)
        return Rollout(request, 0, prompt, tokens, versions.astype(np.float32), finish, versions=versions)

    def __iter__(self) -> Iterator[Rollout]:
        while self.busy:
            yield from self.advance()

    def drawn(self, request: int) -> list[int]:
        return []

    def at_work(self) -> dict[tuple[int, int], int]:
        return {(request, 0): 0 for request in self._waiting}

    def drafts(self) -> dict[int, list[Draft]]:
        return {request: [Draft.empty(0)] for request in self._waiting}

    def abort(self, requests: Collection[int] | None = None) -> None:
        for request in list(self._waiting if requests is None else requests):
            self._waiting.pop(request, None)

    def close(self) -> None:
        self._waiting.clear()

    def __enter__(self) -> "PersonSession":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
