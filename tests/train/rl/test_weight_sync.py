"""By which number engines of their own know the weights that they are sent."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from trimtab.config.rl_jobs import GRPOOptions
from trimtab.distributed.launcher import EngineLost, InProcessGroup
from trimtab.train.rl.weight_sync import WeightSync


class Engine:
    version: int | None = None

    def receive_weights(self, *, version: int) -> None:
        self.version = version


class Policy:
    def send_weights(self) -> None:
        pass


class Engines(InProcessGroup):
    def replace_engine(self, lost: Exception) -> None:
        self.role = Engine()


def test_who_takes_a_lost_engines_place_is_told_the_version_of_the_weights_as_they_are_now(monkeypatch):
    monkeypatch.setattr(WeightSync, "connect", lambda self: None)
    checked: list[int] = []
    roles = SimpleNamespace(actor=InProcessGroup("actor", Policy(), None), rollouts=Engines("rollouts", Engine(), None))
    source = SimpleNamespace(paused=nullcontext, engine_replaced=lambda: None)
    options = GRPOOptions(max_restarts=1, ray=True, rollout_engine="vllm", vllm_num_engines=1)
    weight_sync = WeightSync(options, roles, source, SimpleNamespace(check=checked.append))
    weight_sync.sync(3)
    assert roles.rollouts.role.version == 3
    weight_sync.version = 4  # after an update, before its weights were sent
    weight_sync.replace_engine(EngineLost("gone", 0))
    assert roles.rollouts.role.version == 4 and checked == [3, 4]
    with pytest.raises(EngineLost, match="gone again"):
        weight_sync.replace_engine(EngineLost("gone again", 0))
