import pytest

from trimtab.errors import UserError


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
