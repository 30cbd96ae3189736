from functools import cache
from pathlib import Path

import pytest

from tests import warm
from tests.train.every_loop import words, write_tasks
from tests.train.rl import environment_run, rl_run


@pytest.fixture(scope="session")
def tasks(tmp_path_factory) -> Path:
    """What the runs of every_loop.py need."""
    folder = tmp_path_factory.mktemp("tasks")
    write_tasks(folder)
    return folder


@pytest.fixture(scope="session")
def finished(tasks, tmp_path_factory):
    """A whole run of each loop with several checkpoints, made once; not to be changed."""

    @cache
    def make(loop: str) -> Path:
        out = tmp_path_factory.mktemp(loop.replace(" ", "-"))
        assert warm.run(words(tasks, loop, out)) == 0
        return out

    return make


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> Path:
    """The task of rl_run.py, without dropout, and two reward models; not to be changed."""
    folder = rl_run.write_task(tmp_path_factory.mktemp("task"))
    rl_run.write_judge(folder / "judge", seed=5)
    rl_run.write_judge(folder / "other", seed=6)
    return folder


@pytest.fixture(scope="session")
def recorded(folder, tmp_path_factory) -> Path:
    """A whole run of GRPO, and its recording."""
    out = tmp_path_factory.mktemp("recorded")
    assert warm.run(rl_run.arguments(folder, out, "grpo", f"--record {out}/recording")) == 0
    return out


@pytest.fixture(scope="session")
def games(tmp_path_factory) -> Path:
    """The task of environment_run.py, with its game."""
    folder = environment_run.write_task(tmp_path_factory.mktemp("games"))
    environment_run.write_game(folder)
    return folder


@pytest.fixture(scope="session")
def played(games, tmp_path_factory) -> Path:
    """A whole run on the game, and its recording."""
    out = tmp_path_factory.mktemp("played")
    assert warm.run(environment_run.arguments(games, out, games / "game.py", f"--record {out}/recording")) == 0
    return out
