"""A person in the place of a model: an engine whose tokens are what somebody types.

So an environment is played with the same code, token by token, as in training. Nothing is known of a person's
probabilities: their log-probs are 0.
"""

from collections.abc import Callable, Collection, Sequence

import numpy as np
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from trimtab.data.byte_tokenizer import END, byte_tokenizer
from trimtab.envs.types import Task
from trimtab.rollout.engine import Engine, Session
from trimtab.rollout.sampling import SamplingParams
from trimtab.rollout.trajectory import Finish, Trajectory

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


class Person(Engine):
    """`ask` gives what is said next; what it raises passes through."""

    exact = True
    version = 0
    context = None

    def __init__(self, tokenizer: PreTrainedTokenizerBase, ask: Callable[[], str]):
        self.tokenizer, self.ask = tokenizer, ask

    def session(self, sampling: SamplingParams) -> "PersonSession":
        return PersonSession(self, sampling)


class PersonSession(Session):
    """Requests wait for a moment before somebody is asked, so that what they say is seen first."""

    def __init__(self, person: Person, sampling: SamplingParams):
        super().__init__()
        self.person, self.sampling = person, sampling
        self._new: list[int] = []
        self._waiting: dict[int, tuple[list[int], int]] = {}  # prompt and limit

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
        assert partials is None, "a person's answer has no partial rollout"
        request, self.requests = self.requests, self.requests + 1
        self._new.append(request)
        self._waiting[request] = (prompt_ids, limit or (sampling or self.sampling).max_new_tokens)
        return request

    @property
    def has_unfinished(self) -> bool:
        return bool(self._waiting)

    def step(self, steps: int | None = None) -> list[Trajectory]:
        asked = [request for request in self._waiting if request not in self._new][:1]
        self._new.clear()
        return [self._answer(request) for request in asked]

    def _answer(self, request: int) -> Trajectory:
        said = self.person.ask()
        prompt, limit = self._waiting.pop(request)
        ids = self.person.tokenizer.encode(said, add_special_tokens=False)
        end = self.person.tokenizer.eos_token_id
        tokens = np.array((ids if end is None else [*ids, end])[:limit], dtype=np.int32)
        finish: Finish = "length" if len(ids) >= limit else "stop"
        versions = np.zeros(len(tokens), dtype=np.int32)
        return Trajectory(request, 0, prompt, tokens, versions.astype(np.float32), finish, versions=versions)

    def output_ids(self, request: int) -> list[int]:
        return []

    def output_lengths(self) -> dict[tuple[int, int], int]:
        return {(request, 0): 0 for request in self._waiting}

    def partials(self) -> dict[int, list[Trajectory]]:
        return {request: [Trajectory.empty(0)] for request in self._waiting}

    def abort(self, requests: Collection[int] | None = None) -> None:
        for request in list(self._waiting if requests is None else requests):
            self._waiting.pop(request, None)

    def close(self) -> None:
        self._waiting.clear()
