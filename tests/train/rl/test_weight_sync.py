"""By which number engines of their own know the weights that they are sent."""

from types import SimpleNamespace

import pytest

from trimtab.config.jobs import GRPOOptions
from trimtab.distributed.launcher import EngineLost, InProcessGroup
from trimtab.train.rl.weight_sync import SentWeights


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
    monkeypatch.setattr(SentWeights, "connect", lambda self: None)
    checked: list[int] = []
    roles = SimpleNamespace(actor=InProcessGroup("actor", Policy(), None), rollouts=Engines("rollouts", Engine(), None))
    publishing = SentWeights(GRPOOptions(max_restarts=1), roles, SimpleNamespace(check=checked.append))
    publishing.publish(3)
    assert roles.rollouts.role.version == 3
    publishing.mend(EngineLost("gone", 0), 4)  # after an update, before its weights were published
    assert roles.rollouts.role.version == 4 and checked == [3, 4]
    with pytest.raises(EngineLost, match="gone again"):
        publishing.mend(EngineLost("gone again", 0), 4)
