"""Models, rows and results of small runs, and a supervised run built through the real path, for single steps."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tests.tiny import tiny_model
from trimtab.config.parser import parse
from trimtab.config.resolved_config import check, settle
from trimtab.distributed.device import find_device
from trimtab.distributed.process_group import World
from trimtab.embedded.sort_task import make_rows, make_tokenizer, prompt_of, reference_of
from trimtab.train.metrics import CLOCK_FIELDS, read_rows
from trimtab.train.optimizer import OptimizerStep
from trimtab.train.supervised import MakeTask, SupervisedRun, build_run


def write_model(folder: Path, family: str = "llama", **changes: Any) -> None:
    tokenizer = make_tokenizer()
    tiny_model(family, **{"vocab_size": len(tokenizer), **changes}).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def write_rows(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def preference_rows(count: int, seed: int = 1) -> list[dict]:
    """A prompt with two answers of different lengths, and a margin."""
    rows = []
    for i, row in enumerate(make_rows(count, seed)):
        right = reference_of(row)
        answers = right, right[::-1][: 1 + i % len(right)]
        chosen, rejected = answers if i % 3 else answers[::-1]
        rows.append(
            {
                "prompt": [{"role": "user", "content": prompt_of(row)}],
                "chosen": [{"role": "assistant", "content": chosen}],
                "rejected": [{"role": "assistant", "content": rejected}],
                "margin": 0.25 * i,
            }
        )
    return rows


def labelled_rows(count: int, seed: int = 1) -> list[dict]:
    """Good and bad answers, not in pairs, not as many of one as of the other."""
    rows = []
    for i, row in enumerate(preference_rows(count, seed)):
        answer = row["chosen"] if i % 2 else row["rejected"]
        rows.append({"prompt": row["prompt"], "completion": answer, "label": i % 3 != 0})
    return rows


def step_rows(count: int, labels: list, seed: int = 1) -> list[dict]:
    """Answers in steps that end with ?, with labels taken from `labels` in turn."""
    rows, taken = [], 0
    for row in make_rows(count, seed):
        steps = list(reference_of(row))[: 2 + taken % 3]
        text = prompt_of(row) + "".join(f" {step}?" for step in steps)
        judged = [labels[(taken + j) % len(labels)] for j in range(len(steps))]
        rows.append({"input": text, "label": judged})
        taken += len(steps)
    return rows


def make_run(options_class: type, make_task: MakeTask, folder: Path, words: str = "") -> SupervisedRun:
    """What `train_supervised` would train, from folder/model and folder/train.jsonl."""
    fixed = f"--pretrain {folder}/model --dataset {folder}/train.jsonl --max_len 40 --save_path {folder}/out"
    options, _ = settle(parse(options_class, [*fixed.split(), "--ckpt_path", f"{folder}/out/ck", *words.split()]))
    check(options)
    return build_run(options, make_task, find_device(), World())


def rows(out: Path) -> list[dict]:
    """The metrics of a run, without what the clock says."""
    return [{k: v for k, v in row.items() if k not in CLOCK_FIELDS} for row in read_rows(out / "metrics.jsonl")]


def weights(out: Path) -> dict[str, torch.Tensor]:
    """Of the model or adapter that a run has saved."""
    return load_file(next(out.glob("*model.safetensors")))


def assert_same_tensors(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> None:
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name


def assert_same_model(out: Path, other: Path) -> None:
    assert_same_tensors(weights(out), weights(other))


class NoStop:
    signal = None


def step_gradient(run: SupervisedRun) -> tuple[dict[str, torch.Tensor], dict]:
    """The gradient that the run's next step would apply, and its metrics row."""
    gradients = {}

    def keep(step, finite):
        for name, master in run.optimizer.masters.items():
            gradients[name] = run.optimizer._gradient(name, master).clone()
        return OptimizerStep(0.0, True)

    run.optimizer.step = keep
    row = run.train_step(NoStop())
    return gradients, row


def relative_difference(first: dict, second: dict) -> float:
    """Norm of the difference over the norm, of the whole gradient."""
    difference = sum((first[n] - second[n]).double().square().sum() for n in first)
    return (difference / sum(g.double().square().sum() for g in first.values())).sqrt().item()
