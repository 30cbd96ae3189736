"""One cache for all tests, one thread for each process, and nothing that reaches for a network."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Tiny models gain nothing from a second thread, and threads that wait for each other on a busy machine lose a lot.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("TRIMTAB_CACHE", str(tmp_path_factory.getbasetemp() / "trimtab-cache"))
