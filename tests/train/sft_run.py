"""A small SFT run, for looking at single steps."""

from tests.train import job_run
from tests.train.job_run import NoStop, relative_difference, step_gradient, write_model, write_rows
from trimtab.config.jobs import SFTOptions
from trimtab.embedded.sort_task import make_rows
from trimtab.train.supervised import SupervisedRun
from trimtab.train.supervised_tasks import SFTTask

__all__ = ["NoStop", "make_run", "relative_difference", "step_gradient", "write_task"]


def write_task(folder, family="llama", rows=16, **changes):
    write_model(folder / "model", family, **changes)
    write_rows(folder / "train.jsonl", make_rows(rows, seed=1))


def make_run(folder, words="") -> SupervisedRun:
    return job_run.make_run(SFTOptions, SFTTask, folder, words)
