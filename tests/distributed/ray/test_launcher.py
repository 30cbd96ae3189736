import pytest

from trimtab.errors import UserError
from trimtab.interrupts import StopRequest


@pytest.mark.parametrize("error", [RuntimeError, Exception])
def test_a_ray_that_does_not_come_up_is_one_line(monkeypatch, error):
    from trimtab.distributed.ray import launcher

    def late(**_):
        raise error("The node timed out.\n  Some raylets failed.")

    monkeypatch.delenv(launcher.ADDRESS, raising=False)
    monkeypatch.setattr(launcher.ray, "is_initialized", lambda: False)
    monkeypatch.setattr(launcher.ray, "init", late)
    with pytest.raises(UserError, match=r"^no Ray on this machine: The node timed out\.$"), launcher.connected():
        pass


def test_processes_share_a_device_if_ray_gives_them_the_same_one():
    """Of eight processes on two machines with four devices each, none does."""
    from trimtab.distributed.ray.workers import RayWorkers, WorkerHandle

    workers = RayWorkers(60.0, StopRequest(), world_size=8)
    places = [(node, (device,)) for node in "ab" for device in "0123"]
    workers.members = [WorkerHandle(None, i, "actor", node_id=n, devices=d) for i, (n, d) in enumerate(places)]
    workers.members.append(WorkerHandle(None, 8, "rollouts", node_id="a", devices=("0",), engine=True))
    assert [workers.sharing(member) for member in workers.members] == [1] * 9
    workers.members[1].devices = ("0",)
    assert [workers.sharing(member) for member in workers.members] == [2, 2, *[1] * 7]
    workers.members[0].devices = workers.members[1].devices = ()  # on the machine's processors
    assert workers.sharing(workers.members[0]) == 1
