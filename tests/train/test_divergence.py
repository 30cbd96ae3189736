"""A run that diverges fails, and leaves the last checkpoint that something can be learnt from."""

import math
from functools import partial

import pytest
import torch
from safetensors.torch import load_file

from tests import warm
from tests.train.every_loop import LOOPS, newest_first, words
from tests.train.job_run import weights
from trimtab.train.optimizer import Optimizer, OptimizerStep
from trimtab.train.rl.trainer import Trainer
from trimtab.train.supervised import SupervisedRun


@pytest.mark.short(1)
@pytest.mark.parametrize("job", LOOPS)
def test_a_run_whose_last_losses_are_not_finite_fails_and_names_the_model(tasks, tmp_path, job):
    bad = {"sft": range(8, 12), "ppo": range(8, 10), "tail": range(3, 5)}[job]
    printed = warm.output(words(tasks, job, tmp_path), 1, prepare=partial(nan_losses, bad))
    line = printed.splitlines()[-1]
    assert "not finite in the last 4" in line and str(tmp_path) in line and "Traceback" not in printed
    assert all(tensor.isfinite().all() for tensor in weights(tmp_path).values())


@pytest.mark.short(1)
@pytest.mark.parametrize("job", LOOPS)
def test_what_is_not_finite_is_never_saved_over_what_is(tasks, tmp_path, job):
    line = warm.output(words(tasks, job, tmp_path), 1, prepare=partial(infinite_moment, 4)).splitlines()[-1]
    newest = newest_first(tmp_path / "checkpoints")[0]
    assert "Adam's moments are not finite" in line and str(newest) in line
    kept = [load_file(path) for path in newest.rglob("*.safetensors")]
    assert kept and all(tensor.isfinite().all() for tensors in kept for tensor in tensors.values())
    assert not (tmp_path / "model.safetensors").exists()
    assert warm.run(words(tasks, job, tmp_path, "--load_checkpoint")) == 0


def test_weights_that_are_not_finite_at_the_end_are_no_model(tasks, tmp_path):
    never = words(tasks, "sft", tmp_path, "--save_steps -1")
    printed = warm.output(never, 1, prepare=partial(infinite_moment, 11, "weight/"))
    assert "not finite after step 12" in printed and not (tmp_path / "model.safetensors").exists()


def nan_losses(bad):
    """The losses of these updates are not a number, the critic's and the proposal's too."""

    def spoilt(share):
        share.loss = share.loss * math.nan
        share.figures["loss"] = share.figures["loss"] * math.nan
        return share

    plain = SupervisedRun.train_step

    def train_step(run, stop):
        if run.counters.step in bad:
            learn = type(run.task).loss
            run.task.loss = lambda *given: spoilt(learn(run.task, *given))
        return plain(run, stop)

    SupervisedRun.train_step = train_step
    update = Trainer.update

    def updated(learner, batches, *, totals, step, **settings):
        if step in bad:
            share = type(learner).share
            learner.share = lambda *given, **more: spoilt(share(learner, *given, **more))
        return update(learner, batches, totals=totals, step=step, **settings)

    Trainer.update = updated


def infinite_moment(at, prefix="exp_avg_sq/"):
    """After the update of this number one of the optimiser's numbers is infinite."""
    plain = Optimizer.step

    def stepped(optimizer, step, **how) -> OptimizerStep:
        report = plain(optimizer, step, **how)
        if step == at:
            with torch.no_grad():
                next(t for n, t in optimizer.state().items() if n.startswith(prefix)).view(-1)[0] = torch.inf
        return report

    Optimizer.step = stepped
