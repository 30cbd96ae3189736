"""The role of the reward models: answers in, what each model says of them out."""

from collections.abc import Sequence
from typing import Any

from trimtab.distributed.roles import Role
from trimtab.errors import OutOfMemory
from trimtab.rewards.model import ModelReward
from trimtab.rewards.process import ProcessReward
from trimtab.rewards.types import RewardFailed, RewardRequest, RewardResult
from trimtab.train.pass_limit import NoRoom, memory_guard
from trimtab.train.rl.rollouts import described


class RewardModels(Role):
    def __init__(self, models: Sequence[tuple[ModelReward | ProcessReward, float]]):
        self.models = models

    def describe(self) -> dict[str, Any]:
        columns = {name for model, _ in self.models for name in model.columns}
        return described(self.models) | {"columns": sorted(columns)}

    def score(self, request: RewardRequest) -> list[RewardResult] | RewardFailed | NoRoom:
        """One result a model. What fails is handed back, as by Rollouts."""
        try:
            with memory_guard():
                return [model(request) for model, _ in self.models]
        except RewardFailed as failure:
            return failure
        except OutOfMemory as shortage:
            return no_room(shortage)


def no_room(shortage: OutOfMemory) -> NoRoom:
    return NoRoom(
        f"the reward models do not fit into memory ({shortage}); lower --micro_rollout_batch_size, --generate_max_len "
        "or --prompt_max_len, or give --ref_reward_offload"
    )
