"""On an accelerator, with compiled layers, recorded decoding and half precision: a resumed run is the run that was not
interrupted, bit for bit.

Every run compiles, which takes most of the time. A case may take TRIMTAB_CASE_SECONDS; a run that is not done by then
tells where it stands in its log, run-N.txt in the case's folder (--basetemp says where that is), and ends.
"""

import os
import signal
import time
from functools import partial

import pytest
import torch

from tests import warm
from tests.train.rl.rl_run import arguments, assert_identical, at, result, write_task

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator")
FAST = ["--bf16", "--compile", "on", "--full_determinism"]
SECONDS = float(os.environ.get("TRIMTAB_CASE_SECONDS", 300))


@pytest.mark.parametrize("estimator", ["ppo", "lora"])
def test_killed_and_stopped_and_resumed_equals_uninterrupted(tmp_path, estimator):
    began = time.monotonic()
    folder = write_task(tmp_path)

    def check(words, expected, prepare=None):
        log = tmp_path / f"run-{len(list(tmp_path.glob('run-*.txt'))) + 1}.txt"
        left = max(1.0, SECONDS - (time.monotonic() - began))
        code = warm.run(words, prepare=prepare, log=log, limit=left)
        with log.open("a") as file:
            print(f"ended with {code}, {time.monotonic() - began:.0f} s after the case began", file=file)
        assert code == expected, f"{log.name} of {estimator} (after {left:.0f} s it had to end):\n{log.read_text()}"

    check(arguments(folder, tmp_path / "whole", estimator, *FAST), 0)
    words = arguments(folder, tmp_path / "parts", estimator, *FAST)
    check(words, -signal.SIGKILL, partial(at, (1, "update", 1), signal.SIGKILL))
    words.append("--load_checkpoint")
    check(words, 128 + signal.SIGTERM, partial(at, (2, "update", 1), signal.SIGTERM))
    check(words, 0)
    assert_identical(result(tmp_path / "whole"), result(tmp_path / "parts"))
