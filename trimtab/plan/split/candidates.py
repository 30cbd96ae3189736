"""Layouts to choose from: every combination of the options that nobody has set and that the machines allow."""

import itertools
from collections.abc import Iterator
from typing import Any

from trimtab.errors import UserError
from trimtab.models.load import TrainedModelOptions
from trimtab.models.parallel.tensor_parallel import check_tensor_parallel
from trimtab.plan.hardware import Machines
from trimtab.plan.split.layout import CHANGED
from trimtab.plan.workload import Work

STAGES = (2, 3)
SHORTEST = 1024  # tokens of a row that a process should have at least: shorter ones wait for each other
MOST_CONTEXT = 16


def candidates(options: TrainedModelOptions, machines: Machines, work: Work, config: Any) -> Iterator[dict[str, Any]]:
    """The options to change. `config`: of the trained model."""
    tensors = [size for size in _powers(machines.gpus) if size == 1 or _can_be_cut(config, size)]
    longest = min(MOST_CONTEXT, machines.devices, max(1, work.least // SHORTEST))
    ways: dict[str, list[Any]] = {
        "ds_tensor_parallel_size": tensors,
        "ring_attn_size": _powers(longest),
        "zero_stage": list(STAGES),
        "gradient_checkpointing": [False, True],
        "offload_activations": [False, True],
        "adam_offload": [False, True],
        "shard_size": [None, *(machines.gpus * nodes for nodes in _powers(machines.nodes)[:-1])],
    }
    assert set(ways) == set(CHANGED)
    for name in ways:
        if name in options.given:
            ways[name] = [getattr(options, name)]
    for values in itertools.product(*ways.values()):
        found = dict(zip(ways, values))
        if found["offload_activations"] and not found["gradient_checkpointing"]:
            continue  # the layers' inputs alone are worth moving
        if found["shard_size"] is not None and "shard_size" not in options.given:
            found["shard_size"] //= found["ds_tensor_parallel_size"]  # so many whole machines hold a copy
        yield found


def _can_be_cut(config: Any, parts: int) -> bool:
    try:
        check_tensor_parallel(config, parts, "")
    except UserError:
        return False
    return True


def _powers(most: int) -> list[int]:
    """1, 2, 4 and so on; those of a machine must divide it."""
    return [2**power for power in range(most.bit_length()) if most % 2**power == 0 or most > 2**power]


def words_of(changes: dict[str, Any], options: TrainedModelOptions) -> list[str]:
    """The flags that ask for these options, without those that are so anyway."""
    defaults = type(options)()
    words = []
    for name, value in changes.items():
        if value == getattr(defaults, name):
            continue
        words.append(f"--{name}" if value is True else f"--{name} {value}")
    return words
