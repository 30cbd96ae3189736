"""How many answers a reward model is asked about in one pass of an RL run."""

import pytest

from trimtab.config.jobs import PPOOptions
from trimtab.distributed.device import find_device
from trimtab.rewards import build


@pytest.mark.parametrize(
    "changes, most",
    [
        ({"micro_rollout_batch_size": 5}, 5),
        ({"micro_rollout_batch_size": 5, "micro_reward_batch_size": 3}, 3),
        ({"micro_reward_batch_size": 3, "use_dynamic_batch": True}, None),
    ],
)
def test_a_pass_of_a_reward_model_has_its_own_size(monkeypatch, changes, most):
    made = []
    monkeypatch.setattr(build, "ModelReward", lambda name, *_, **settings: made.append(settings["max_samples"]))
    build._model("a/b", PPOOptions(**changes), find_device(), None)
    assert made == [most]
