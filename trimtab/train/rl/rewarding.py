"""The role of the reward models: answers in, what each model says of them out."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from trimtab.config.jobs import RLOptions
from trimtab.distributed.launcher import Role
from trimtab.distributed.mesh import Mesh
from trimtab.errors import OutOfMemory
from trimtab.models.compile import compile_problem, disable_compile
from trimtab.rewards.models import ModelReward, ProcessReward
from trimtab.rewards.types import RewardFailed, RewardRequest, RewardResult, rewards_info
from trimtab.train.compiling import agreed, settle_layers, told
from trimtab.train.pass_limit import NoRoom, memory_guard


class RewardModels(Role):
    def __init__(self, models: Sequence[tuple[ModelReward | ProcessReward, float]], options: RLOptions, mesh: Mesh):
        self.models, self.options, self.mesh = models, options, mesh

    def compile_layers(self, *, learnt: float, scored: float, decided: bool | None) -> dict[str, Any]:
        settled = []
        for found, _ in self.models:
            scores = [partial(found.keeping.at_work, found.model)]
            settled.append(
                settle_layers(
                    self.options, found.model, found.device, self.mesh, scored=scored, decided=decided, scores=scores
                )
            )
        return told(settled, "reward model")

    def layers_problem(self) -> str:
        problems = [problem for found, _ in self.models if (problem := compile_problem(found.model))]
        return agreed(self.mesh, problems[0] if problems else "")

    def leave_layers_plain(self) -> None:
        for found, _ in self.models:
            disable_compile(found.model)

    def describe(self) -> dict[str, Any]:
        columns = {name for model, _ in self.models for name in model.columns}
        texts = any(model.reads_texts for model, _ in self.models)
        return rewards_info(self.models) | {"columns": sorted(columns), "texts": texts}

    def score(self, request: RewardRequest) -> list[RewardResult] | RewardFailed | NoRoom:
        """One result a model. What fails is handed back, as by Rollouts, and after all models have been asked: split
        ones work in all processes or in none."""
        results: list[RewardResult] = []
        failures: list[RewardFailed] = []
        try:
            with memory_guard():
                for model, _ in self.models:
                    try:
                        results.append(model(request))
                    except RewardFailed as failure:
                        failures.append(failure)
        except OutOfMemory as shortage:
            return no_room(shortage)
        return failures[0] if failures else results


def no_room(shortage: OutOfMemory) -> NoRoom:
    return NoRoom(
        f"the reward models do not fit into memory ({shortage}); lower --micro_reward_batch_size, --generate_max_len "
        "or --prompt_max_len, or give --ref_reward_offload"
    )
