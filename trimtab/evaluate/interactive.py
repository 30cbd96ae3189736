"""A conversation with a model: what was said so far, and the next answer, shown while it is written.

A tokenizer's chat template is used where it is asked for, and also where nothing was asked for. Without one a turn goes
into --input_template, and the turns follow each other as text.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from trimtab.config.jobs import ChatOptions, PlayOptions
from trimtab.data.chat_template import ChatRenderer, in_template
from trimtab.data.conversion import conditioned
from trimtab.data.formats import Message
from trimtab.data.sources import load_rows
from trimtab.data.tokenizer import END, byte_tokenizer
from trimtab.distributed.device import find_device
from trimtab.distributed.random_state import seed_everything
from trimtab.envs.adapter import describe
from trimtab.envs.chat_tokens import MessageParser
from trimtab.envs.types import Task
from trimtab.errors import UserError
from trimtab.evaluate.generation import load_job_tokenizer, sampling_of
from trimtab.models.load import load_frozen_policy
from trimtab.rollout.engine import Engine, Session
from trimtab.rollout.episode import EpisodeRecord, Segment
from trimtab.rollout.factory import build_engine
from trimtab.rollout.sampling import SamplingParams, request_seed, stop_tokens
from trimtab.rollout.trajectory import Finish, Trajectory
from trimtab.server.environment_factory import LABEL, PROMPT, episode_settings, make_environment_engine, open_pool

SHOWN_AT_ONCE = 8  # tokens

Show = Callable[[str], None]


class Conversation:
    def __init__(self, options: ChatOptions):
        self.options, self.tokenizer = options, load_job_tokenizer(options)
        seed_everything(options.seed, deterministic=options.full_determinism)
        policy = load_frozen_policy(options.pretrain, options, find_device(), flag="--pretrain").model
        self.engine = build_engine(policy, self.tokenizer, max_num_seqs=1, prefix_caching=True)
        unasked = "input_template" not in options.given
        self.as_chat = options.apply_chat_template or bool(unasked and self.tokenizer.chat_template)
        self._chat = ChatRenderer(self.tokenizer) if self.as_chat else None
        context = self.engine.context
        self.most_tokens = options.max_len if context is None else min(options.max_len, context)
        self._stops = stop_tokens(policy, self.tokenizer)
        self._preamble = Path(options.ta_prompt).expanduser().read_text() if options.ta_prompt else ""
        self._answers = 0
        self.clear()

    def clear(self) -> None:
        """Forget what was said."""
        self.text = self._preamble
        self.turns: list[Message] = []
        if self._preamble:
            self.turns.append({"role": "system", "content": self._preamble.strip()})

    def ask(self, words: str, show: Show) -> Finish:
        """Answer these words; `show` gets the answer in pieces. Ctrl-C ends it where it is ("abort")."""
        ids = self.tokenizer(self._prompt(words), add_special_tokens=False)["input_ids"]
        room = self.most_tokens - len(ids)
        if room < 1:
            raise UserError(
                f"the conversation has {len(ids)} tokens with these words, and {self.most_tokens} is the most: /clear "
                "begins a new one"
            )
        answer = _Answer(self.tokenizer, show)
        sampling = sampling_of(self.options, max_new_tokens=room, stop_token_ids=self._stops)
        seed = request_seed(self.options.seed, self._answers)
        finish: Finish = "abort"
        try:
            with self.engine.session(sampling) as session:
                request = session.add(ids, seed=seed)
                while session.has_unfinished:
                    for rollout in session.step(SHOWN_AT_ONCE):
                        answer.grow(rollout.ids, last=True)
                        finish = rollout.finish_reason
                    answer.grow(session.output_ids(request))
        except KeyboardInterrupt:
            pass
        self._answers += 1
        self._remember(words, answer.text)
        return finish

    def _prompt(self, words: str) -> str:
        condition = self.options.condition
        if self._chat is not None:
            turns = [*self.turns, {"role": "user", "content": words}]
            return self._chat.render_prompt(conditioned(turns, condition), where="the conversation")
        return conditioned(self._continued(words), condition)

    def _continued(self, words: str) -> str:
        before = f"{self.text}\n" if self.text else ""
        return before + in_template(words, self.options.input_template)

    def _remember(self, words: str, answer: str) -> None:
        self.text = self._continued(words) + answer
        self.turns += [{"role": "user", "content": words}, {"role": "assistant", "content": answer}]


class _Answer:
    """An answer on its way to the reader: only text that later tokens cannot change is shown."""

    def __init__(self, tokenizer: Any, show: Show):
        self.tokenizer, self.show, self.text = tokenizer, show, ""

    def grow(self, ids: list[int], *, last: bool = False) -> None:
        text = self.tokenizer.decode(ids, skip_special_tokens=True)
        # A character of several tokens is not whole yet.
        whole = text if last else text.rstrip("\N{REPLACEMENT CHARACTER}")
        if whole.startswith(self.text) and len(whole) > len(self.text):
            self.show(whole[len(self.text) :])
            self.text = whole


# ---- A person in the place of a model: an engine whose tokens are what somebody types
#
# So an environment is played with the same code, token by token, as in training. Nothing is known of a person's
# probabilities: their log-probs are 0.


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


# ---- `trimtab play`: episodes of an environment by a model or a person, with the code that plays them in training.


SEEDS = 2**31  # a row's, as training gives them: below this


@dataclass(frozen=True)
class Heard:
    """What was said, once all is known of it, with its tokens."""

    said: Segment
    ids: list[int]


@dataclass(frozen=True)
class Over:
    episode: EpisodeRecord
    finish: Finish
    sequences: list[Trajectory]  # one for each branch


class Playing:
    """`ask`: what gives a person's next words, where no model is describe or a person is asked for."""

    def __init__(self, options: PlayOptions, ask: Callable[[], str]):
        self.options = options
        self.by_person = options.by_hand or not options.pretrain
        if not options.plays:
            raise UserError("there is nothing to play: give a FILE.py or a name such as trimtab:guess after the verb")
        # There is one episode at a time.
        self.pool = open_pool(replace(options, env_workers=1))
        try:
            self.info = self.pool.info
            self.tokenizer: Any = load_job_tokenizer(options) if options.pretrain else tokenizer_of_a_person()
            inner, self.stops = self._engine(ask)
            self.plain = self.tokenizer.chat_template is None
            self.engine = make_environment_engine(
                inner, self.pool, self.tokenizer, episode_settings(options, plain=self.plain)
            )
        except BaseException:
            self.pool.close()
            raise

    def _engine(self, ask: Callable[[], str]) -> tuple[Engine, tuple[int, ...]]:
        options, end = self.options, self.tokenizer.eos_token_id
        if self.by_person:
            return Person(self.tokenizer, ask), () if end is None else (end,)
        seed_everything(options.seed, deterministic=options.full_determinism)
        policy = load_frozen_policy(options.pretrain, options, find_device(), flag="--pretrain").model
        return build_engine(policy, self.tokenizer, max_num_seqs=1), stop_tokens(policy, self.tokenizer)

    def written(self, name: str, arguments: dict[str, Any]) -> str:
        """The call of a tool in the player's tokens."""
        return MessageParser(self.tokenizer, self.info.tools).written(name, arguments)

    def tasks(self) -> list[Task]:
        """One for each episode, from --row on; after the last row comes the first."""
        options = self.options
        first, count = options.row, options.episodes
        rows = self._rows(first + count)
        seed = request_seed(options.seed, 0)
        if not rows:
            return [Task(row, 0, request_seed(seed, row) % SEEDS) for row in range(first, first + count)]
        if first >= len(rows):
            raise UserError(f"--row {first}: there are {len(rows):,}, and the first is 0")
        places = [row % len(rows) for row in range(first, first + count)]
        return [self._task(row, rows[row], request_seed(seed, row) % SEEDS) for row in places]

    def _rows(self, count: int) -> list[dict[str, Any]]:
        options = self.options
        if options.dataset:
            found = load_rows(
                options.dataset,
                probabilities=options.dataset_probs,
                split=options.dataset_split,
                max_samples=None,
                seed=options.seed,
            )
            return [dict(found[row]) for row in range(min(count, len(found)))]
        return self.pool.rows(count, options.seed) if self.info.offers_rows else []

    def _task(self, number: int, row: dict[str, Any], seed: int) -> Task:
        """Of a file's row by its columns' names; an environment's own rows have their names already."""
        options = self.options
        asked = options.input_key if options.dataset else PROMPT
        label = options.label_key if options.dataset else LABEL
        if options.dataset and asked not in row:
            raise UserError(f"--input_key {asked}: row {number} has only {', '.join(row)}; name the prompt's column")
        prompt = row.get(asked, "")
        said = prompt if isinstance(prompt, list) else []
        if not isinstance(prompt, str | list) or any(not isinstance(message, dict) for message in said):
            where = f"--input_key {asked}" if options.dataset else options.environment_flag
            what = f"the prompt of row {number} is {describe(prompt)}"
            raise UserError(f"{where}: {what}; a text or a list of messages is needed")
        rest = {name: value for name, value in row.items() if name not in (asked, label)}
        task = Task(number, 0, seed, prompt, row.get(label) if label else None, rest)
        return replace(task, text=self._text(task))

    def play(self, task: Task) -> Iterator[Heard | Over]:
        """What is said as it is said, and at last the whole episode."""
        options = self.options
        limit = {"max_new_tokens": options.max_new_tokens, "stop_token_ids": self.stops}
        sampling = sampling_of(options, seed=options.seed, **limit)
        told, found, opened = 0, [], False
        with self.engine.session(sampling) as session:
            request = session.add(self._prompt(task), seed=request_seed(task.seed, 0), task=task)
            while session.has_unfinished:
                found += session.step()
                branches = session.partials().get(request, [])
                if not branches or (so_far := branches[-1].episode) is None:
                    continue
                if not opened:
                    opened = True
                    yield self._opening(task, so_far)
                said = so_far.said
                # Of a turn all is known with what follows it.
                complete = len(said) - (1 if said and said[-1].drawn else 0)
                for heard in said[told:complete]:
                    yield Heard(heard, branches[heard.branch].ids[heard.start : heard.end])
                told = max(told, complete)
        found.sort(key=lambda rollout: rollout.branch)
        episode = found[-1].episode
        assert episode is not None, "an environment was played"
        if not opened:
            yield self._opening(task, episode)
        for heard in episode.said[told:]:
            yield Heard(heard, found[heard.branch].ids[heard.start : heard.end])
        yield Over(episode, found[-1].finish_reason, found)

    def _opening(self, task: Task, episode: EpisodeRecord) -> Heard:
        messages = task.asked if episode.opening is None else episode.opening
        return Heard(Segment(messages, 0, 0, False), [])

    def _text(self, task: Task) -> str:
        """The row's prompt as the policy reads it, where the environment opens with it."""
        if self.plain:
            return "".join(str(message.get("content") or "") for message in task.asked)
        return ChatRenderer(self.tokenizer).render_prompt(task.asked, where=f"row {task.row}")

    def _prompt(self, task: Task) -> list[int]:
        text = self._text(task) if task.text is None else task.text
        return self.tokenizer.encode(text, add_special_tokens=False)

    def close(self) -> None:
        self.engine.close()
