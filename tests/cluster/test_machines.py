"""The machines that other tests disturb: they are apart, can be killed, cut off and started again, and end with us."""

import subprocess
import sys

import pytest

from tests.cluster.machines import wait_until

pytestmark = pytest.mark.long

HEALTH_LIMIT = 20  # seconds, with the head's settings in machines.py


@pytest.fixture(scope="module")
def three(machines):
    machines.start(0, 1, 2, cpus=1)
    return machines


def begin(three, tmp_path, *more: str):
    log = tmp_path / "log"
    driver = three.head.popen(
        [sys.executable, "-m", "tests.cluster.plain_job", "3", *more], log, RAY_ADDRESS=three.address
    )
    wait_until(lambda: "all wait" in log.read_text(), 90, log.read_text)
    return driver, log


def test_a_killed_machine_is_lost_at_once_and_leaves_no_process(three, tmp_path):
    driver, log = begin(three, tmp_path)
    assert all(machine.address in log.read_text() for machine in three.all[:3])
    victim = three.all[2]
    before = victim.processes()
    assert len(before) > 5 and victim.workers()
    victim.kill()
    assert driver.wait(30) == 1
    assert f"lost {victim.address} Actor" in log.read_text()
    three.assert_no_orphan()
    listed = ["ps", "-o", "pid=", "-p", ",".join(map(str, before))]
    left = lambda: subprocess.run(listed, capture_output=True, text=True).stdout.strip()  # noqa: E731
    wait_until(lambda: not left(), 10, left)
    victim.start(cpus=1)


def test_a_machine_that_is_cut_off_is_lost_within_the_limit_of_health(three, tmp_path):
    driver, log = begin(three, tmp_path)
    victim = three.all[1]
    victim.cut()
    try:
        assert driver.wait(HEALTH_LIMIT) == 1
    finally:
        victim.mend()
    assert f"lost {victim.address} ActorDiedError" in log.read_text()
    victim.kill()  # Ray does not take a node in again that was away
    three.assert_no_orphan()
    victim.start(cpus=1)


def test_a_folder_apart_is_seen_by_its_machine_alone(three, tmp_path):
    shared = tmp_path / "shared"
    shared.mkdir()
    (shared / "file").touch()
    one, two = three.all[1:3]
    two.kill()
    two.start(cpus=1, apart=[shared])
    driver, log = begin(three, tmp_path, str(shared / "file"))
    assert f"{one.address}:True" in log.read_text() and f"{two.address}:False" in log.read_text()
    driver.kill()
    driver.wait(10)
