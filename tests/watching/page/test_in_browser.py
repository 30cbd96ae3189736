"""The live page's script in a real browser; skipped where no Chromium is installed."""

import pytest

from tests.report.test_browser import CHROMIUM, chromium
from tests.watching.page.runs import EVIL, rl_run, served

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")


def test_the_script_runs_and_what_a_model_wrote_does_not(tmp_path):
    with served(rl_run(tmp_path / "grpo", response=EVIL)) as client:
        alone = "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1"
        found = chromium(tmp_path / "profile", alone, "--dump-dom", f"{client.base_url}/run/1")
    page = found.stdout
    assert " ago</time>" in page and '<div id="controls" class="following">' in page
    assert page.count("<script") == 1 and "<img" not in page and "alert(1)" in page
    complaints = [line for line in found.stderr.splitlines() if "CONSOLE" in line]
    assert complaints == [], complaints
