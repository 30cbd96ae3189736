"""What a run that fails says."""

from types import SimpleNamespace

import pytest

from trimtab.api.starting import Hearing
from trimtab.config.jobs import SFTOptions
from trimtab.distributed.supervision import LAUNCHER_SOCKET
from trimtab.errors import RunFailed, UserError
from trimtab.running import training


def failing(monkeypatch, message: str) -> None:
    def train_supervised(options):
        raise RuntimeError(message)

    monkeypatch.setattr(training, "_trainer", lambda options: SimpleNamespace(train_supervised=train_supervised))
    monkeypatch.setattr(training, "watch", lambda seconds: None)


@pytest.mark.parametrize("size, kind", [("2", RunFailed), ("1", RuntimeError)])
def test_a_broken_connection_of_several_processes_is_told_in_a_line(monkeypatch, tmp_path, size, kind):
    monkeypatch.setenv("WORLD_SIZE", size)
    monkeypatch.delenv(LAUNCHER_SOCKET, raising=False)
    failing(monkeypatch, "[pair.cc:537] Read error [127.0.0.1]: Connection reset by peer. Check the remote worker.")
    options = SFTOptions(pretrain="model", dataset="data", save_path=str(tmp_path))
    with pytest.raises(kind) as raised:
        training.start_training(options, "trimtab.cli.train_sft", [])
    if size == "2":
        assert str(raised.value) == (
            "another process of this run has ended, and its own output says why ([pair.cc:537] Read error [127.0.0.1]: "
            "Connection reset by peer); this run has no checkpoint to go on from"
        )


def test_python_raises_what_the_launcher_says_of_a_killed_process():
    hearing = Hearing("grpo")
    hearing("trimtab grpo: failed: lost its connection to another process of this run", True)
    hearing("process 1 was ended by signal 9 (SIGKILL)", True)
    hearing("the last checkpoint is here", True)
    with pytest.raises(RunFailed, match=r"^process 1 was ended by signal 9 \(SIGKILL\); the last checkpoint is here$"):
        hearing.check(137)


def test_a_mistake_is_raised_though_another_process_tells_later_that_it_lost_its_connection():
    hearing = Hearing("sft")
    hearing("process 1 ended with exit code 2:", True)
    hearing("  trimtab sft: error: no column 'nothing'", True)
    hearing("trimtab sft: failed: lost its connection to another process of this run (closed by peer)", True)
    with pytest.raises(UserError, match="no column 'nothing'"):
        hearing.check(2)
    with pytest.raises(RunFailed, match="lost its connection"):
        hearing.check(1)
