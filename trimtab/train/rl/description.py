"""Which roles an RL run has, and which processes of a launcher each of them is in."""

from trimtab.config.jobs import RLOptions
from trimtab.config.sources import listed
from trimtab.distributed.staging import Unit
from trimtab.train.rl import builders
from trimtab.train.rl.builders import has_reference


def units_of(options: RLOptions, processes: int) -> list[Unit]:
    everywhere = options.ranks(None, processes)
    shares_policy = has_reference(options) and options.lora_rank > 0
    actor_roles = ("actor", "rollouts", *(["reference"] if shares_policy else []))
    units = [Unit("actor", builders.build_actor, actor_roles, everywhere)]
    if has_reference(options) and not shares_policy:
        ranks = options.ranks(options.ref_num_gpus_per_node, processes)
        units.append(Unit("reference", builders.build_reference, ("reference",), ranks))
    if options.teacher_model:
        units.append(Unit("teacher", builders.build_teacher, ("teacher",), everywhere))
    if options.estimator.critic:
        ranks = options.ranks(options.critic_num_gpus_per_node, processes)
        units.append(Unit("critic", builders.build_critic, ("critic",), ranks))
    if listed(options.reward_pretrain):
        ranks = options.ranks(options.reward_num_gpus_per_node, processes)
        units.append(Unit("reward", builders.build_reward_models, ("reward",), ranks))
    return units
