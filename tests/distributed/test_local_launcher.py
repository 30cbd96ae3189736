"""Roles in two processes, and a stranger who can write to the store they share."""

import os
import pickle
import signal
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from tests import warm
from trimtab.distributed import supervision as watching
from trimtab.distributed.device import find_device
from trimtab.distributed.launcher import FAILURE, InProcessGroup, Processes, Role, RpcHub
from trimtab.distributed.process_group import find_world, leave_world
from trimtab.errors import RunFailed

LIMIT = 2.0  # seconds that a process may stand still


class Touch:
    """Unpickled, it creates a file."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


class Adder:
    def __init__(self, rank: int):
        self.rank = rank

    def add(self, number: int, *, more: int) -> int:
        return number + more + self.rank

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def stop(self) -> None:
        if self.rank == 1:
            if not os.fork():  # who ends it when the first has left
                time.sleep(4 * LIMIT)
                os.kill(os.getppid(), signal.SIGKILL)
                os._exit(0)
            os.kill(os.getpid(), signal.SIGSTOP)

    def leave(self) -> None:
        if self.rank == 1:
            os._exit(3)


def serve(folder: Path) -> None:
    world = find_world(find_device())
    hub = RpcHub(world, {"adder": Adder(world.rank)})
    if not world.is_rank_zero:
        hub.serve()
        return
    group = hub.group("adder")
    assert group.call("add", [1, 10], more=100) == [101, 111]
    stranger = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    store = dist.distributed_c10d._get_default_store()
    store.set(FAILURE, "")
    store.get(FAILURE)  # until then it may be on its way
    (key,) = (key for key in stranger.list_keys() if key.endswith(FAILURE))  # torch puts its own words before a key
    stranger.set(key, pickle.dumps(("RunFailed", 1, Touch(folder / "marker"))))
    try:
        group.call("leave")
    except RuntimeError as error:
        assert error.__cause__ is not error, "whoever follows the causes of an error would never come to an end"
        (folder / "raised").write_text(str(error))
    leave_world()


def test_what_a_stranger_writes_into_the_store_is_not_run(tmp_path):
    assert warm.call_world(serve, 2, tmp_path) == [0, 3]
    assert (tmp_path / "raised").exists() and not (tmp_path / "marker").exists()


def watched(what: str, folder: Path) -> None:
    """A call in which the second process takes long, or is stopped, or the first lets it wait for the next call."""
    os.dup2(os.open(folder / f"said{os.environ['RANK']}", os.O_WRONLY | os.O_CREAT), 2)
    watching.watch(LIMIT)
    world = find_world(find_device())
    hub = RpcHub(world, {"adder": Adder(world.rank)})
    if world.is_rank_zero:
        if what == "hang":
            hub.group("adder").call("sleep", [0, 60])
        if what == "stop":
            hub.group("adder").call("stop")
        with watching.own_heartbeat.waiting():  # for a reward, say
            time.sleep(2 * LIMIT)
        hub.disconnect()
    else:
        hub.serve()
    leave_world()


def test_one_that_stays_in_a_call_is_named_where_it_stands(tmp_path):
    codes = warm.call_world(watched, 2, "hang", tmp_path)
    assert codes[0] != 0 and codes[1] == 1
    said = (tmp_path / "said1").read_text()
    assert "process 1 hangs: adder.sleep has not moved for 2 s (--hang_timeout)" in said and "time.sleep" in said


def test_one_that_is_stopped_is_named_by_the_first_without_a_launcher_of_ours(tmp_path):
    assert warm.call_world(watched, 2, "stop", tmp_path)[0] == 1
    assert "process 1 has given no sign of life for 2 s" in (tmp_path / "said0").read_text()


def test_who_waits_for_a_call_or_for_a_reward_is_left_alone(tmp_path):
    assert warm.call_world(watched, 2, "wait", tmp_path) == [0, 0]


class Clock(Role):
    def __init__(self, rank: int):
        self.rank = rank
        self.told: list[int] = []

    def tell(self, number: int) -> list[int]:
        self.told.append(number)
        return [self.rank, *self.told]

    def meet(self, number: int, *, folder: Path) -> list[int]:
        """Come back when the other one is here too."""
        (folder / f"here{self.rank}").touch()
        while not all((folder / f"here{rank}").exists() for rank in (1, 2)):
            time.sleep(0.01)
        return self.tell(number)

    def sleep(self, *, seconds: float) -> None:
        time.sleep(seconds)


def test_a_call_in_this_process_is_done_when_it_has_been_made():
    group = InProcessGroup("clock", Clock(0), find_device())
    first, second = group.start("tell", [1]), group.start("tell", [2])
    assert first.name == "clock.tell" and second.wait(5) == [[0, 1, 2]] and first.wait() == [[0, 1]]


def three_groups(folder: Path) -> None:
    world = find_world(find_device())
    hub = RpcHub(world, {"clock": Clock(world.rank)})
    if not world.is_rank_zero:
        hub.serve()
        return leave_world()
    everyone, second, third = (hub.group("clock", ranks and Processes.apart(ranks)) for ranks in (None, [1], [2]))
    assert [everyone.size, second.size, third.size] == [3, 1, 1]
    meeting = [group.start("meet", [1], folder=folder) for group in (second, third)]
    all_of_it = everyone.start("tell", [2, 3, 4])
    assert all_of_it.wait(60) == [[0, 2], [1, 1, 3], [2, 1, 4]], "asked last, and waited for first"
    assert [call.wait() for call in meeting] == [[[1, 1]], [[2, 1]]], "at the same time"
    pair = hub.group("clock", Processes([0, 1, 2], [0, 0, 1], [0, 0, 1]))
    assert pair.size == 2 and pair.call("tell", [5, 6]) == [[0, 2, 5], [2, 1, 4, 6]], "one result a part"
    assert len(pair.call("describe")) == 3, "one a process"
    assert pair.each("tell", [7, 8, 9]) == [[0, 2, 5, 7], [1, 1, 3, 5, 8], [2, 1, 4, 6, 9]], "a value a process"
    late = second.start("sleep", seconds=60.0)
    with pytest.raises(RunFailed, match=r"clock\.sleep: process 1 has not answered for 0\.5 s"):
        late.wait(0.5)
    (folder / "done").touch()


def test_groups_of_different_sizes_work_at_the_same_time_and_one_that_is_late_is_named(tmp_path):
    processes = warm.start_calls(three_groups, 3, tmp_path)
    processes[0].join(60)
    assert (tmp_path / "done").exists()
    for process in processes[1:]:
        if process.is_alive():
            os.kill(process.pid, signal.SIGKILL)
        process.join()
