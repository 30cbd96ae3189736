"""What a run says may be lost; what it learns may not."""

import os
import signal
from functools import partial

import pytest

from tests import warm
from tests.train.every_loop import LOOPS, signal_in_step, words
from tests.train.job_run import assert_same_model
from trimtab.train.metrics import read_rows


@pytest.mark.short(1)
@pytest.mark.parametrize("loop", LOOPS)
def test_a_run_whose_output_nobody_reads_any_more_ends_as_any_other(tasks, finished, tmp_path, loop):
    assert warm.run(words(tasks, loop, tmp_path), prepare=broken_output) == 0
    assert_same_model(tmp_path, finished(loop))


def broken_output():
    """As after `| head`, for both streams."""
    reader, writer = os.pipe()
    os.dup2(writer, 1)
    os.dup2(writer, 2)
    os.close(writer)
    os.close(reader)


@pytest.mark.short(1)
@pytest.mark.parametrize("loop", LOOPS)
def test_a_terminal_that_hangs_up_leaves_a_checkpoint(tasks, finished, tmp_path, loop):
    hung_up = partial(disconnect, loop, signal.SIG_DFL)
    printed = warm.output(words(tasks, loop, tmp_path), 128 + signal.SIGHUP, prepare=hung_up)
    assert "checkpoint saved in" in printed
    assert warm.run(words(tasks, loop, tmp_path, "--load_checkpoint")) == 0
    assert_same_model(tmp_path, finished(loop))


def test_with_nohup_a_terminal_may_hang_up(tasks, tmp_path):
    assert warm.run(words(tasks, "sft", tmp_path), prepare=partial(disconnect, "sft", signal.SIG_IGN)) == 0
    assert len(read_rows(tmp_path / "metrics.jsonl")) == 12


def disconnect(loop, before):
    """`before`: what the command was started to do about it."""
    signal.signal(signal.SIGHUP, before)
    signal_in_step(loop, 3, signal.SIGHUP)
