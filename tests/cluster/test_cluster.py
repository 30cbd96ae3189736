"""The Ray of the short tests itself: nobody else can reach it, and its workers end when they are told."""

import os
import signal
from functools import partial
from pathlib import Path

import psutil
import pytest


def leave_a_note(folder: Path) -> None:
    (folder / str(os.getpid())).write_text("prepared")


def addresses_of(process: psutil.Process) -> list[str]:
    """Those that a process listens on; one that has ended in the meantime does on none."""
    try:
        return [c.laddr.ip for c in process.net_connections("tcp") if c.status == "LISTEN"]
    except psutil.NoSuchProcess:
        return []


def test_it_listens_on_loopback_only(cluster):
    ours = [psutil.Process(), *psutil.Process().children(recursive=True)]
    listening = [address for process in ours for address in addresses_of(process)]
    assert len(listening) > 5 and {address.removeprefix("::ffff:") for address in listening} == {"127.0.0.1"}


def test_its_workers_are_processes_that_can_be_prepared_and_killed(cluster, tmp_path):
    import ray

    @ray.remote(num_cpus=0.1)
    class Anybody:
        def process(self):
            return os.getpid()

    cluster.workers.prepare(partial(leave_a_note, tmp_path))
    try:
        actor = Anybody.options(runtime_env={"env_vars": {"SO": "that it is a new process"}}).remote()
        process = ray.get(actor.process.remote(), timeout=60)
    finally:
        cluster.workers.prepare(None)
    assert (tmp_path / str(process)).read_text() == "prepared"
    os.kill(process, signal.SIGKILL)
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(actor.process.remote(), timeout=60)
