"""What is found of a call when one engine is gone and another is slow."""

import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from tests.cluster.machines import wait_until
from trimtab.distributed.launcher import Unanswered
from trimtab.distributed.serialization import Serializer
from trimtab.interrupts import StopRequest


class Engine:
    """A process as the controller knows it, whose only role waits for a file."""

    def heartbeat(self):
        return "rollouts.collect", 0.0, False

    def process(self):
        return os.getpid()

    def perform(self, own, shared):
        wire = Serializer()
        *_, (path,) = wire.unpack(own.copy())
        while not Path(path).exists():
            time.sleep(0.02)
        return "done", np.frombuffer(wire.pack(path), dtype=np.uint8)


@pytest.fixture
def engines(cluster):
    import ray

    from trimtab.distributed.ray.launcher import RayGroup
    from trimtab.distributed.ray.workers import RayWorkers, WorkerHandle

    remote = ray.remote(num_cpus=0.1, concurrency_groups={"health": 1})(Engine)
    handles = [remote.remote() for _ in range(3)]
    members = [WorkerHandle(handle, rank, "rollouts", engine=True) for rank, handle in enumerate(handles)]
    workers = RayWorkers(60.0, StopRequest(), 0)
    workers.members = members
    for member in members:
        (member.process,) = workers.results([(member, member.handle.process.remote())], 60)
    yield RayGroup(workers, Serializer(), "rollouts", members, replace_engine=lambda lost: None)
    for handle in handles:
        ray.kill(handle)


def test_a_loss_or_a_late_answer_does_not_take_the_others_with_it(engines, tmp_path):
    from trimtab.distributed.launcher import EngineLost

    there, never, later = str(tmp_path), str(tmp_path / "never"), str(tmp_path / "later")
    call = engines.start("collect", [there, never, later])
    assert isinstance(call.poll(0.1)[1], Unanswered)
    os.kill(engines.members[1].process, signal.SIGKILL)
    wait_until(lambda: isinstance(call.poll(0.1)[1], EngineLost), 30, lambda: "nobody is lost")
    found = call.poll(0.1)
    assert found[0] == there and found[1].rank == 1 and isinstance(found[2], Unanswered)
    Path(later).touch()
    assert call.poll(60.0) == [there, found[1], later]
