"""Every job that learns from a fixed set of examples, as tests run it: its words, its rows, the models beside it."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tests.train.job_run import labelled_rows, make_run, preference_rows, step_rows, write_model, write_rows
from trimtab.config.jobs import DPOOptions, KDOptions, KTOOptions, PRMOptions, RMOptions, SFTOptions
from trimtab.embedded.sort_task import make_rows
from trimtab.train.supervised import SupervisedRun
from trimtab.train.supervised_tasks import DPOTask, KDTask, KTOTask, PRMTask, RMTask, SFTTask
from trimtab.train.task import SupervisedTask

HARD, SOFT = ["y", "n", "y"], [0.2, 1.0, 0.7, 0.0]
OTHER = "{folder}/other"  # a second model with the same tokenizer, unlike the first


@dataclass
class Job:
    options: type
    task: type[SupervisedTask]
    make_rows: Any  # (count, seed) -> rows
    words: str = ""

    @property
    def verb(self) -> str:
        return self.options.verb


STEPS = "--placeholder_token ? --reward_tokens y n"
PAIRS = partial(Job, DPOOptions, DPOTask, preference_rows)

JOBS = {
    "sft": Job(SFTOptions, SFTTask, make_rows),
    "rm": Job(RMOptions, RMTask, preference_rows),
    "rm margin": Job(RMOptions, RMTask, preference_rows, "--margin_loss"),
    "prm hard": Job(PRMOptions, PRMTask, lambda count, seed: step_rows(count, HARD, seed), STEPS),
    "prm soft": Job(PRMOptions, PRMTask, lambda count, seed: step_rows(count, SOFT, seed), STEPS),
    "dpo": PAIRS(f"--ref_pretrain {OTHER}"),
    "cdpo and nll": PAIRS(f"--ref_pretrain {OTHER} --label_smoothing 0.1 --nll_loss_coef 0.2"),
    "ipo": PAIRS(f"--ref_pretrain {OTHER} --ipo"),
    "orpo": PAIRS("--preference_loss orpo"),
    "simpo": PAIRS("--preference_loss simpo --beta 2"),
    "dpo precomputed": PAIRS(f"--ref_pretrain {OTHER} --precompute_ref_log_probs"),
    "kto": Job(KTOOptions, KTOTask, labelled_rows, f"--ref_pretrain {OTHER} --undesirable_loss_weight 0.5"),
    "kd": Job(KDOptions, KDTask, make_rows, f"--teacher_model {OTHER}"),
    "kd reverse": Job(KDOptions, KDTask, make_rows, f"--teacher_model {OTHER} --kd_loss reverse_kl"),
    "kd jsd": Job(KDOptions, KDTask, make_rows, f"--teacher_model {OTHER} --kd_loss jsd --jsd_beta 0.3"),
}


def write_job(folder: Path, name: str, family: str = "llama", rows: int = 16, **changes: Any) -> None:
    """model/, other/ and train.jsonl of a job. The other model is surer of itself, so it likes the data less."""
    write_model(folder / "model", family, **changes)
    if name != "sft":
        write_model(folder / "other", family, seed=1, **{"spread": 0.3, **changes})
    write_rows(folder / "train.jsonl", JOBS[name].make_rows(rows, 1))


def job_words(folder: Path, name: str, words: str = "") -> str:
    return f"{JOBS[name].words} {words}".format(folder=folder)


def run_of(folder: Path, name: str, words: str = "") -> SupervisedRun:
    return make_run(JOBS[name].options, JOBS[name].task, folder, job_words(folder, name, words))
