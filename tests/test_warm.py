"""What tests start ends, and says where it stood."""

import subprocess
import sys
import time
from functools import partial

import pytest

from tests import warm
from tests.processes import has_ended


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_a_command_that_does_not_end_tells_where_it_stands_and_takes_along_what_it_has_started(tmp_path):
    log = tmp_path / "log"
    assert warm.run(["--help"], prepare=partial(stand_still, tmp_path / "pid"), log=log, limit=1) == 1
    assert "in stand_still" in log.read_text()
    assert has_ended(int((tmp_path / "pid").read_text()))


def stand_still(place):
    place.write_text(str(subprocess.Popen(["sleep", "60"]).pid))
    time.sleep(60)
