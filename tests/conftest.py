"""One cache for all tests, one thread for each process, and nothing that reaches for a network."""

import gc
import os
from collections import Counter
from functools import partial

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Tiny models gain nothing from a second thread, and threads that wait for each other on a busy machine lose a lot.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
from xdist.scheduler import LoadFileScheduling


class OneCluster(LoadFileScheduling):
    """All tests on Ray in one process, for all of them share one Ray; other tests by their files."""

    def _split_scope(self, nodeid):
        return "tests/cluster" if nodeid.startswith("tests/cluster/") else super()._split_scope(nodeid)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    return OneCluster(config, log) if config.getoption("dist") == "loadfile" else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Of a test marked `short(n)` the first n repetitions are short, the others long."""
    seen = Counter()
    for item in items:
        if (marker := item.get_closest_marker("short")) is not None:
            name = item.nodeid.partition("[")[0]
            seen[name] += 1
            if seen[name] > marker.args[0]:
                item.add_marker("long")


def pytest_collection_finish():
    """Half a million objects of imported packages need not be looked through again at each collection of garbage."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def trimtab(capsys):
    """Runs `trimtab WORDS` in this process; see tests/command.py."""
    from tests import command

    return partial(command.run, capsys)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("TRIMTAB_CACHE", str(tmp_path_factory.getbasetemp() / "trimtab-cache"))
