"""Which roles a tail run has."""

import dataclasses

from trimtab.config.jobs import TailOptions
from trimtab.distributed.launcher import Unit
from trimtab.train.rl.roles import in_their_processes, make_units
from trimtab.train.tail import builders


def tail_units_of(options: TailOptions, processes: int) -> list[Unit]:
    """Those of an RL run, with more beside the policy, and the policy as it was where only held-out answers need it."""
    actor, *others = make_units(options)
    start = builders.name_of_start(options)
    roles = ["actor", "rollouts"]
    if start and options.lora_rank > 0:
        roles.append(start)
    if options.method == "repulse":
        roles += ["proposal", "proposal_rollouts"]
    if options.analytic_bad_word_calc:
        roles.append("bad_words")
    units = [dataclasses.replace(actor, build=builders.build_actor, roles=tuple(roles)), *others]
    if start == "start" and options.lora_rank == 0:
        units.append(Unit("start", builders.build_start, ("start",)))
    return in_their_processes(options, units, processes)
