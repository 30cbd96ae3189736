"""A small SFT run built through the real path, for looking at single steps."""

import json

import torch

from tests.tiny import tiny_model
from trimtab.config.checks import settle
from trimtab.config.jobs import SFTOptions
from trimtab.config.parse import parse
from trimtab.data.tokenizer import load_tokenizer
from trimtab.distributed.device import find_device, seed_everything
from trimtab.embedded.sort_task import make_rows, make_tokenizer
from trimtab.models.load import load_policy
from trimtab.train.optimiser import StepReport
from trimtab.train.sft import SFTTask
from trimtab.train.supervised import SupervisedRun


def write_task(folder, family="llama", rows=16, **changes):
    tokenizer = make_tokenizer()
    tiny_model(family, vocab_size=len(tokenizer), **changes).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in make_rows(rows, seed=1)))


def make_run(folder, words="") -> SupervisedRun:
    fixed = f"--pretrain {folder}/model --dataset {folder}/train.jsonl --max_len 40 --save_path {folder}/out"
    options, _ = settle(parse(SFTOptions, [*fixed.split(), "--ckpt_path", f"{folder}/out/ck", *words.split()]))
    tokenizer = load_tokenizer(options.pretrain, disable_fast=False, chat_template=None)
    device = find_device()
    task = SFTTask(options, tokenizer)
    seed_everything(options.seed)
    policy = load_policy(options, device).model
    task.check_model(policy)
    return SupervisedRun(options, task, policy, tokenizer, device)


class NoStop:
    signal = None


def step_gradient(run: SupervisedRun) -> tuple[dict[str, torch.Tensor], dict]:
    """The gradient that the run's next step would apply, and its metrics row."""
    gradients = {}

    def keep(step):
        for name, master in run.optimiser.masters.items():
            gradients[name] = run.optimiser._gradient(name, master).clone()
        return StepReport(0.0, True)

    run.optimiser.step = keep
    row = run.train_step(NoStop())
    return gradients, row


def relative_difference(first: dict, second: dict) -> float:
    """Norm of the difference over the norm, of the whole gradient."""
    difference = sum((first[n] - second[n]).double().square().sum() for n in first)
    return (difference / sum(g.double().square().sum() for g in first.values())).sqrt().item()
