"""Which roles a tail run has."""

import dataclasses

from trimtab.config.jobs import TailOptions
from trimtab.distributed.staging import Unit
from trimtab.train.rl.description import units_of
from trimtab.train.tail import builders


def tail_units_of(options: TailOptions, processes: int) -> list[Unit]:
    """Those of an RL run, with more beside the policy, and the policy as it was where only held-out answers need it."""
    actor, *others = units_of(options, processes)
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
        ranks = options.ranks(options.ref_num_gpus_per_node, processes)
        units.append(Unit("start", builders.build_start, ("start",), ranks))
    return units
