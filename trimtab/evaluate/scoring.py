"""`trimtab generate --eval_task rm`: the reward of every answer in the data, by a reward model.

Prompt and answer are rendered, tokenised and cut as in the training of reward models, so an answer has here the score
that it has there.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np
from datasets import Dataset

from trimtab.config.jobs import GenerateOptions
from trimtab.data.building import settings_of, up_to_answer
from trimtab.data.formats import SupervisedRecord, read_supervised, recognise_supervised
from trimtab.data.places import located, places_of
from trimtab.data.rendering import AnswerRenderer
from trimtab.data.sources import load_rows
from trimtab.data.token_cache import rows_hash
from trimtab.data.tokenising import tokenise
from trimtab.distributed.device import Device, find_device
from trimtab.distributed.process_group import World, find_world, leave_world, share_signals
from trimtab.distributed.random_state import seed_everything
from trimtab.errors import UserError
from trimtab.evaluate.generation import load_job_tokenizer, trainable
from trimtab.evaluate.journal import Journal
from trimtab.evaluate.work import work_through, write_rows
from trimtab.interrupts import StopRequest
from trimtab.models.pretrained import weights_fingerprint
from trimtab.models.reward import HEAD
from trimtab.rewards.models import ModelReward

SCORED_AT_ONCE = 256  # rows; within them passes are made of rows of like length


def score(options: GenerateOptions) -> None:
    device = find_device()
    try:
        world = find_world(device)
        with StopRequest(at_once=True) as stop, share_signals(stop, world):
            Scoring(options, device, world, stop).run()
    finally:
        leave_world()


def rehearse_scoring(options: GenerateOptions) -> list[str]:
    """What can be said without the model's weights."""
    load_job_tokenizer(options)
    rows = Answers(options)
    rows.record(0)
    return [f"{len(rows):,} answers ({rows.columns.description})"]


@dataclass(frozen=True)
class Keys:
    """The options that say where a row keeps its parts."""

    input_key: str
    output_key: str | None
    pretrain_mode: bool = False


class Answers:
    """The rows to score."""

    def __init__(self, options: GenerateOptions):
        self.rows: Dataset = load_rows(
            options.dataset,
            probabilities=options.dataset_probs,
            split=options.dataset_split,
            max_samples=options.max_samples,
            seed=options.seed,
        )
        self.places = places_of(self.rows, "the answers")
        self.columns = recognise_supervised(self.rows.column_names, settings_of(Keys, options), self.rows[0])

    def __len__(self) -> int:
        return len(self.rows)

    def record(self, row: int) -> SupervisedRecord:
        """A prompt and its answer, which may have been a conversation's last turn."""
        record = located(partial(read_supervised, self.rows[row], self.columns), row, self.places)
        if record.response is not None:
            return record
        return SupervisedRecord(record.prompt[:-1], record.prompt[-1:], record.tools)


class Scoring:
    def __init__(self, options: GenerateOptions, device: Device, world: World, stop: StopRequest):
        self.options, self.world, self.stop = options, world, stop
        tokenizer = load_job_tokenizer(options)
        self.rows = Answers(options)
        world.say(f"answers: {len(self.rows):,} ({self.rows.columns.description})")
        seed_everything(options.seed, deterministic=options.full_determinism)
        self.model = ModelReward(
            options.pretrain,
            options,
            device,
            max_len=options.max_len,
            max_samples=options.micro_batch_size,
            flag="--pretrain",
        )
        if not hasattr(self.model.inner, HEAD):
            raise UserError(
                f"--pretrain {options.pretrain}: {type(self.model.inner).__name__} is not a decoder; score with it "
                "while generating, as --reward_pretrain"
            )
        self.tokenizer = tokenizer
        self.renderer = AnswerRenderer(
            self.rows.columns.names,
            tokenizer,
            "answers",
            as_chat=options.apply_chat_template,
            input_template=options.input_template,
        )
        self._sum, self._count, self._cut = 0.0, 0, 0

    def run(self) -> None:
        """Score what is not scored yet, and write the rows of all."""
        journal = Journal(self.options.output_path, self._settings())
        work_through(len(self.rows), journal, self.world, self.scores, self.figures, "answers", self.stop)
        if self.world.is_rank_zero:
            if self._cut:
                print(f"{'note':9}{self._cut:,} answers were judged by their first {self.options.max_len:,} tokens")
            write_rows([self._output(row, journal.done[row]) for row in range(len(self.rows))], journal, self.options)

    def scores(self, items: list[int]) -> Iterator[tuple[int, float]]:
        for start in range(0, len(items), SCORED_AT_ONCE):
            some = items[start : start + SCORED_AT_ONCE]
            sequences = self.sequences(some)
            self._cut += sum(len(ids) > self.options.max_len for ids in sequences)
            rewards = self.model.scores(sequences)
            self._sum, self._count = self._sum + sum(rewards), self._count + len(rewards)
            yield from zip(some, rewards)

    def sequences(self, items: list[int]) -> list[np.ndarray]:
        """What the model reads of these rows: up to the end of the answer."""
        renderings = []
        for item in items:
            record = self.rows.record(item)
            render = partial(self.renderer.render_answer, record.prompt, record.response, record.tools)
            renderings.append(located(render, item, self.rows.places))
        return [up_to_answer(*tokens)[0] for tokens in tokenise(renderings, self.tokenizer)]

    def figures(self) -> dict[str, str]:
        """What is shown beside the bar."""
        return {"reward": f"{self._sum / self._count:.4f}"} if self._count else {}

    def _output(self, row: int, reward: float) -> dict[str, Any]:
        record = self.rows.record(row)
        answer = record.response
        if isinstance(answer, list) and len(answer) == 1:
            answer = answer[0]["content"]
        return {"input": trainable(record.prompt, self.options), "output": answer, "reward": reward}

    def _settings(self) -> dict[str, Any]:
        """What the rewards depend on."""
        options = self.options
        return {
            "model": weights_fingerprint(self.model.model),
            "precision": "bf16" if options.bf16 else "fp32",
            "data": rows_hash(self.rows.rows),
            "choice of columns": asdict(self.rows.columns),
            "template": [options.input_template, options.apply_chat_template, self.tokenizer.chat_template],
            "max_len": options.max_len,
        }
