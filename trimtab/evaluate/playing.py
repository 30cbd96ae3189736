"""`trimtab play`: episodes of an environment by a model or a person, with the code that plays them in training."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from trimtab.config.jobs import PlayOptions
from trimtab.data.chat import ChatRenderer
from trimtab.data.sources import load_rows
from trimtab.distributed.device import find_device
from trimtab.distributed.random_state import seed_everything
from trimtab.envs.adapter import describe
from trimtab.envs.chat_tokens import MessageParser
from trimtab.envs.types import Task
from trimtab.errors import UserError
from trimtab.evaluate.generation import load_job_tokenizer, sampling_of
from trimtab.evaluate.person import Person, tokenizer_of_a_person
from trimtab.models.load import load_frozen_policy
from trimtab.rollout.engine import Engine
from trimtab.rollout.episode import Episode, Segment
from trimtab.rollout.factory import build_engine
from trimtab.rollout.sampling import request_seed, stop_tokens
from trimtab.rollout.trajectory import Finish, Trajectory
from trimtab.server.environment_factory import LABEL, PROMPT, episode_settings, make_environment_engine, open_pool

SEEDS = 2**31  # a row's, as training gives them: below this


@dataclass(frozen=True)
class Heard:
    """What was said, once all is known of it, with its tokens."""

    said: Segment
    ids: list[int]


@dataclass(frozen=True)
class Over:
    episode: Episode
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

    def _opening(self, task: Task, episode: Episode) -> Heard:
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
