"""Which roles an RL run has, and which processes of a launcher each of them is in."""

from collections.abc import Sequence

from trimtab.config.jobs import RLOptions
from trimtab.config.sources import listed
from trimtab.distributed.staging import Unit
from trimtab.train.rl import builders
from trimtab.train.rl.builders import has_reference


def units_of(options: RLOptions, processes: int) -> list[Unit]:
    everywhere = ranks_of(None, options, processes)
    shares_policy = has_reference(options) and options.lora_rank > 0
    actor_roles = ("actor", "rollouts", *(["reference"] if shares_policy else []))
    units = [Unit("actor", builders.build_actor, actor_roles, everywhere)]
    if has_reference(options) and not shares_policy:
        ranks = ranks_of(options.ref_num_gpus_per_node, options, processes)
        units.append(Unit("reference", builders.build_reference, ("reference",), ranks))
    if options.teacher_model:
        units.append(Unit("teacher", builders.build_teacher, ("teacher",), everywhere))
    if options.estimator.critic:
        ranks = ranks_of(options.critic_num_gpus_per_node, options, processes)
        units.append(Unit("critic", builders.build_critic, ("critic",), ranks))
    if listed(options.reward_pretrain):
        ranks = ranks_of(options.reward_num_gpus_per_node, options, processes)
        units.append(Unit("reward", builders.build_reward_models, ("reward",), ranks))
    return units


def group_sizes(options: RLOptions, processes: int) -> dict[str, int]:
    """In how many processes each model is."""
    asked = {
        "reference": options.ref_num_gpus_per_node,
        "critic": options.critic_num_gpus_per_node,
        "reward": options.reward_num_gpus_per_node,
    }
    asked |= {"actor": None, "teacher": None}
    return {name: len(ranks_of(number, options, processes)) for name, number in asked.items()}


def ranks_of(asked: int | None, options: RLOptions, processes: int) -> Sequence[int]:
    """The processes of a role that is to have so many: the last ones, since the first one also runs the loop."""
    first = 1 if options.controller_apart and processes > 1 else 0
    return range(processes)[first:][-(asked or processes) :]
