"""Calls under way in several groups at once, of different sizes, and one that is not answered in time."""

import os
import signal
import time
from pathlib import Path

import pytest

from tests import warm
from trimtab.distributed.device import find_device
from trimtab.distributed.launcher import LocalGroup, Processes, Role
from trimtab.errors import RunFailed


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
    group = LocalGroup("clock", Clock(0), find_device())
    first, second = group.start("tell", [1]), group.start("tell", [2])
    assert first.name == "clock.tell" and second.wait(5) == [[0, 1, 2]] and first.wait() == [[0, 1]]


def three_groups(folder: Path) -> None:
    from trimtab.distributed.local_launcher import Switchboard
    from trimtab.distributed.process_group import find_world, leave_world

    world = find_world(find_device())
    switchboard = Switchboard(world, {"clock": Clock(world.rank)})
    if not world.leads:
        switchboard.serve()
        return leave_world()
    everyone, second, third = (
        switchboard.group("clock", ranks and Processes.apart(ranks)) for ranks in (None, [1], [2])
    )
    assert [everyone.size, second.size, third.size] == [3, 1, 1]
    meeting = [group.start("meet", [1], folder=folder) for group in (second, third)]
    all_of_it = everyone.start("tell", [2, 3, 4])
    assert all_of_it.wait(60) == [[0, 2], [1, 1, 3], [2, 1, 4]], "asked last, and waited for first"
    assert [call.wait() for call in meeting] == [[[1, 1]], [[2, 1]]], "at the same time"
    pair = switchboard.group("clock", Processes([0, 1, 2], [0, 0, 1], [0, 0, 1]))
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
