"""A tiny model with its data, and a training command run on them in this process."""

import json
import string
from dataclasses import dataclass, field
from pathlib import Path
from unittest.mock import patch

from tests import command
from tests.tiny import tiny_model
from trimtab.embedded import sort_task
from trimtab.train.metrics import read_rows
from trimtab.train.supervised import SupervisedRun

STEP_END = "ки"


def make_tokenizer():
    """The embedded task's tokenizer of characters, grown to all of ASCII and to Math-Shepherd's end of a step."""
    with patch.object(sort_task, "CHARACTERS", string.printable):
        tokenizer = sort_task.make_tokenizer()
    tokenizer.add_tokens(STEP_END)
    return tokenizer


def write_model(folder: Path, family: str = "llama", **changes) -> Path:
    tokenizer = make_tokenizer()
    changes = {"vocab_size": len(tokenizer), "pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1, **changes}
    tiny_model(family, **changes).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def write_rows(path: Path, rows: list[dict]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def conversation(*turns: str) -> dict:
    """Turns of the user and the assistant, one after the other."""
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[i % 2], "content": text} for i, text in enumerate(turns)]}


@dataclass
class Job:
    """Runs the command, and keeps what it trained on."""

    capsys: object
    folder: Path
    verb: str = "sft"
    run: SupervisedRun | None = None  # the last one that made a step
    batches: list = field(default_factory=list)

    def __call__(self, *words: object) -> command.Outcome:
        self.batches = []
        return command.run(self.capsys, self.verb, *words)

    def watch(self, monkeypatch) -> None:
        plain = SupervisedRun.train_step

        def train_step(run, stop):
            self.run = run
            self.batches += run.make_batches(run.task.cut(run.task.store, run.order.step_samples(run.counters.step)))
            return plain(run, stop)

        monkeypatch.setattr(SupervisedRun, "train_step", train_step)

    def rows(self, folder: Path) -> list[dict]:
        return read_rows(folder / "metrics.jsonl")

    def samples(self) -> list[tuple[str, str]]:
        """(text, the trained part of it) of every sample in the order of training."""
        decode = self.run.tokenizer.decode
        return [
            (decode(batch.ids_T[rows]), decode(batch.ids_T[rows][batch.trained_T[rows]]))
            for batch in self.batches
            for rows in (span.rows() for span in batch.spans)
        ]
