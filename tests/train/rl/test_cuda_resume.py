"""On an accelerator, with compiled layers, recorded decoding and half precision: a resumed run is the run that was not
interrupted, bit for bit."""

import signal
from functools import partial

import pytest
import torch

from tests import warm
from tests.train.rl.rl_run import arguments, assert_identical, result, write_task
from tests.train.rl.test_resume import at

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator")
FAST = ["--bf16", "--compile", "on", "--full_determinism"]


@pytest.mark.parametrize("estimator", ["ppo", "lora"])
def test_killed_and_stopped_and_resumed_equals_uninterrupted(tmp_path, estimator):
    folder = write_task(tmp_path)
    results = []
    for ends in ((), (signal.SIGKILL, signal.SIGTERM)):
        out = tmp_path / f"ended-{len(ends)}"
        words = arguments(folder, out, estimator, *FAST)
        for iteration, sent in enumerate(ends, 1):
            expected = -sent if sent == signal.SIGKILL else 128 + sent
            assert warm.run(words, prepare=partial(at, (iteration, "update", 1), sent)) == expected
            words = arguments(folder, out, estimator, *FAST, "--load_checkpoint")
        assert warm.run(words) == 0
        results.append(result(out))
    assert_identical(*results)
