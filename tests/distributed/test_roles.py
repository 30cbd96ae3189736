"""Roles in two processes, and a stranger who can write to the store they share."""

import os
import pickle
from pathlib import Path

from tests import warm


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

    def leave(self) -> None:
        if self.rank == 1:
            os._exit(3)


def serve(folder: Path) -> None:
    import torch.distributed as dist

    from trimtab.distributed.device import find_device
    from trimtab.distributed.roles import FAILURE, Switchboard
    from trimtab.distributed.world import find_world

    world = find_world(find_device())
    switchboard = Switchboard(world, {"adder": Adder(world.rank)})
    if not world.leads:
        switchboard.serve()
        return
    group = switchboard.group("adder")
    assert group.call("add", [1, 10], more=100) == [101, 111]
    stranger = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    dist.distributed_c10d._get_default_store().set(FAILURE, "")
    (key,) = (key for key in stranger.list_keys() if key.endswith(FAILURE))  # torch puts its own words before a key
    stranger.set(key, pickle.dumps(("RunFailed", 1, Touch(folder / "marker"))))
    try:
        group.call("leave")
    except RuntimeError as error:
        (folder / "raised").write_text(str(error))


def test_what_a_stranger_writes_into_the_store_is_not_run(tmp_path):
    assert warm.call_world(serve, 2, tmp_path) == [0, 3]
    assert (tmp_path / "raised").exists() and not (tmp_path / "marker").exists()
