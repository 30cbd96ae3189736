"""What tests start ends, and says where it stood."""

import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from tests import warm


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_a_command_that_does_not_end_tells_where_it_stands_and_takes_along_what_it_has_started(tmp_path):
    log = tmp_path / "log"
    assert warm.run(["--help"], prepare=partial(stand_still, tmp_path / "pid"), log=log, limit=1) == 1
    assert "in stand_still" in log.read_text()
    assert_gone(int((tmp_path / "pid").read_text()))


def stand_still(place):
    place.write_text(str(subprocess.Popen(["sleep", "60"]).pid))
    time.sleep(60)


def assert_gone(pid):
    for _ in range(100):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().split()[2]
        except (FileNotFoundError, ProcessLookupError):
            return
        if state == "Z":
            return
        time.sleep(0.05)
    os.kill(pid, signal.SIGKILL)
    raise AssertionError("it lives on")
