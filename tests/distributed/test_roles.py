"""Roles in two processes, and a stranger who can write to the store they share."""

import os
import pickle
import signal
import time
from pathlib import Path

from tests import warm

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
    import torch.distributed as dist

    from trimtab.distributed.device import find_device
    from trimtab.distributed.local_launcher import FAILURE, Switchboard
    from trimtab.distributed.process_group import find_world, leave_world

    world = find_world(find_device())
    switchboard = Switchboard(world, {"adder": Adder(world.rank)})
    if not world.leads:
        switchboard.serve()
        return
    group = switchboard.group("adder")
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
    import trimtab.distributed.supervision as watching
    from trimtab.distributed.device import find_device
    from trimtab.distributed.local_launcher import Switchboard
    from trimtab.distributed.process_group import find_world, leave_world

    os.dup2(os.open(folder / f"said{os.environ['RANK']}", os.O_WRONLY | os.O_CREAT), 2)
    watching.watch(LIMIT)
    world = find_world(find_device())
    switchboard = Switchboard(world, {"adder": Adder(world.rank)})
    if world.leads:
        if what == "hang":
            switchboard.group("adder").call("sleep", [0, 60])
        if what == "stop":
            switchboard.group("adder").call("stop")
        with watching.pulse.waiting():  # for a reward, say
            time.sleep(2 * LIMIT)
        switchboard.hang_up()
    else:
        switchboard.serve()
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
