"""docs/cluster.md: its commands run on a real Ray, and what it names exists."""

import os
import re
from functools import partial

import pytest

from tests import warm
from tests.config.every_job import EVERY_JOB
from tests.docs.pages import DOCS, commands
from tests.embedded.test_docs_commands import TWO_ITERATIONS
from trimtab.config.option import find

OF_RAY = {"help", "head", "port", "node", "address", "working", "runtime", "dashboard"}  # as far as the first hyphen


@pytest.mark.long
def test_every_command_of_the_page_runs(cluster, tmp_path):
    first, *others = commands("cluster")
    assert first == ["trimtab", "quickstart"] and others
    here = {"log": tmp_path / "log", "prepare": partial(os.chdir, tmp_path)}
    assert warm.run(["quickstart", "--steps", "2", "--iterations", "1"], **here) == 0, here["log"].read_text()
    for program, *words in others:
        assert program == "trimtab" and "--ray" in words
        command = [*words, *TWO_ITERATIONS]
        assert warm.run(command, environment=cluster.environment, **here) == 0, here["log"].read_text()
    assert (tmp_path / "my-cluster-grpo" / "report.html").is_file()


def test_every_option_the_page_names_exists_and_every_link_leads_somewhere():
    text = (DOCS / "cluster.md").read_text()
    named = {name for name in re.findall(r"--(\w+)(?!\w|\.\.\.)", text) if not name.endswith("_")}
    assert {name for name in named if not any(find(job, name) for job in EVERY_JOB)} <= OF_RAY
    for target in re.findall(r"\]\((\w+\.md)", text):
        assert (DOCS / target).is_file(), target
    assert "docs/cluster.md" in (DOCS.parent / "README.md").read_text()
    assert "RAY_AUTH_MODE=disabled" not in text
