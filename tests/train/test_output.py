"""What a run says may be lost; what it learns may not."""

import os
import signal
from functools import partial

import pytest
import torch

from tests import warm
from tests.train.every_loop import LOOPS, model, signal_in_step, words
from trimtab.train.metrics import read_rows


@pytest.mark.short(1)
@pytest.mark.parametrize("loop", LOOPS)
def test_a_run_whose_output_nobody_reads_any_more_ends_as_any_other(tasks, finished, tmp_path, loop):
    assert warm.run(words(tasks, loop, tmp_path), prepare=broken_output) == 0
    expected = model(finished(loop))
    assert all(torch.equal(tensor, expected[name]) for name, tensor in model(tmp_path).items())


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
    prepare, log = partial(disconnect, loop, signal.SIG_DFL), tmp_path / "log"
    assert warm.run(words(tasks, loop, tmp_path), prepare=prepare, log=log) == 128 + signal.SIGHUP
    assert "checkpoint saved in" in log.read_text()
    assert warm.run([*words(tasks, loop, tmp_path), "--load_checkpoint"]) == 0
    expected = model(finished(loop))
    assert all(torch.equal(tensor, expected[name]) for name, tensor in model(tmp_path).items())


def test_with_nohup_a_terminal_may_hang_up(tasks, tmp_path):
    assert warm.run(words(tasks, "sft", tmp_path), prepare=partial(disconnect, "sft", signal.SIG_IGN)) == 0
    assert len(read_rows(tmp_path / "metrics.jsonl")) == 12


def disconnect(loop, before):
    """`before`: what the command was started to do about it."""
    signal.signal(signal.SIGHUP, before)
    signal_in_step(loop, 3, signal.SIGHUP)
