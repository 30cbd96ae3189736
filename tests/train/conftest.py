from pathlib import Path

import pytest

from tests import warm
from tests.train.every_loop import words, write_tasks


@pytest.fixture(scope="session")
def tasks(tmp_path_factory) -> Path:
    """What the runs of every_loop.py need."""
    folder = tmp_path_factory.mktemp("tasks")
    write_tasks(folder)
    return folder


@pytest.fixture(scope="session")
def finished(tasks, tmp_path_factory):
    """A whole run of each loop with several checkpoints, made once; not to be changed."""
    results: dict[str, Path] = {}

    def make(loop: str) -> Path:
        if loop not in results:
            results[loop] = tmp_path_factory.mktemp(loop)
            assert warm.run(words(tasks, loop, results[loop])) == 0
        return results[loop]

    return make
