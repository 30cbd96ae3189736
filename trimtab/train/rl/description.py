"""Which roles an RL run has, and which processes each of them is in: of a launcher, or of a cluster."""

import dataclasses
from collections.abc import Iterable

from trimtab.config.jobs import RLOptions
from trimtab.config.sources import listed
from trimtab.distributed.launcher import Unit
from trimtab.distributed.ray.placement import Layout
from trimtab.plan.layouts import layout_of
from trimtab.rollout.factory import engine_environment
from trimtab.train.rl import builders
from trimtab.train.rl.builders import has_reference


def units_of(options: RLOptions, processes: int) -> list[Unit]:
    return in_their_processes(options, described(options), processes)


def described(options: RLOptions) -> list[Unit]:
    """The units of a run, in no process yet."""
    shares_policy = has_reference(options) and options.lora_rank > 0
    rollouts = () if options.engines_apart else ("rollouts",)
    actor_roles = ("actor", *rollouts, *(["reference"] if shares_policy else []))
    units = [Unit("actor", builders.build_actor, actor_roles, engines=rollouts, learns=True)]
    if has_reference(options) and not shares_policy:
        units.append(Unit("reference", builders.build_reference, ("reference",)))
    if options.teacher_model:
        units.append(Unit("teacher", builders.build_teacher, ("teacher",)))
    if options.estimator.critic:
        units.append(Unit("critic", builders.build_critic, ("critic",), learns=True))
    if listed(options.reward_pretrain):
        units.append(Unit("reward", builders.build_reward_models, ("reward",)))
    if options.engines_apart:
        build, environment = builders.build_engine_rollouts, engine_environment()
        units.append(Unit("rollouts", build, ("rollouts",), apart=True, environment=environment))
    return units


def in_their_processes(options: RLOptions, units: Iterable[Unit], processes: int) -> list[Unit]:
    """`processes`: how many a launcher started; in a cluster the options say it all."""
    units = list(units)
    if not options.ray:
        return [dataclasses.replace(unit, ranks=options.ranks_of(unit.name, processes)) for unit in units]
    layout = layout_of_units(options, units)
    return [unit if unit.apart else dataclasses.replace(unit, ranks=layout.ranks_of(unit.name)) for unit in units]


def layout_of_units(options: RLOptions, units: Iterable[Unit]) -> Layout:
    return layout_of(options, [unit.name for unit in units if not unit.apart])
