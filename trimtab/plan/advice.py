"""Which flags make a job fit that does not: each is tried, in the order of what it costs."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from trimtab.config.rl_jobs import RLOptions
from trimtab.errors import UserError
from trimtab.models.load import TrainedModelOptions

NAMED = 3  # flags that are named, of those that each suffice
Change = dict[str, Any]


def changes(options: TrainedModelOptions, processes: int, *, accelerator: bool) -> Iterator[Change]:
    """The cheapest first: more passes, more gathering, a third more arithmetic, processes that wait for each other in
    every layer, main memory; and last what changes what is learnt."""
    if not options.bf16 and accelerator:
        yield {"bf16": True}
    by_tokens = options.use_dynamic_batch if isinstance(options, RLOptions) else options.packing_samples
    if not by_tokens and options.micro_train_batch_size > 1:
        yield {"micro_train_batch_size": 1}
    if processes > 1 and options.zero_stage < 3:
        yield {"zero_stage": 3}
    if not options.gradient_checkpointing:
        yield {"gradient_checkpointing": True}
    for name in ("ring_attn_size", "ds_tensor_parallel_size"):
        for size in (2**power for power in range(1, processes.bit_length())):
            if getattr(options, name) < size and processes % size == 0:
                yield {name: size}
    if isinstance(options, RLOptions) and accelerator and not options.ref_reward_offload:
        yield {"ref_reward_offload": True}
    if accelerator and not options.offload_activations:
        yield {"gradient_checkpointing": True, "offload_activations": True}
    if accelerator and not options.adam_offload:
        yield {"adam_offload": True}
    if not options.bf16 and not accelerator:  # may be slow there
        yield {"bf16": True}
    if not options.lora_rank:
        yield {"lora_rank": 16}


def that_fit(
    options: TrainedModelOptions, tried: list[Change], peak: Callable[[TrainedModelOptions], int], room: int
) -> list[Change]:
    """Single changes that each suffice; where none does, one set of them that does; empty: nothing here does.

    `peak`: bytes that a process needs under these options, or a UserError: they do not go together.
    """

    def needed(change: Change) -> int | None:
        try:
            return peak(dataclasses.replace(options, **change))
        except UserError:
            return None

    found = {number: size for number, change in enumerate(tried) if (size := needed(change)) is not None}
    enough = [tried[number] for number, size in found.items() if size <= room]
    if enough:
        return _distinct(enough)[:NAMED]
    together: Change = {}
    for number in found:
        wanted = together | tried[number]
        size = needed(wanted)
        if size is None:
            continue
        together = wanted
        if size <= room:
            return [_least(together, lambda change: (needed(change) or room + 1) <= room)]
    return []


def _distinct(found: list[Change]) -> list[Change]:
    """Of one flag only the smallest value that is enough."""
    return list({tuple(change): change for change in reversed(found)}.values())[::-1]


def _least(change: Change, suffices: Callable[[Change], bool]) -> Change:
    """Without what is not needed after all, the dearest first."""
    for name in reversed(list(change)):
        without = {other: value for other, value in change.items() if other != name}
        if without and suffices(without):
            change = without
    return change


def in_words(found: list[Change]) -> str:
    if not found:
        return "no flag makes it fit: more processes, larger devices or a smaller model would"
    return f"try {', '.join(words(change) for change in found)}, or a smaller model"


def words(change: Change) -> str:
    return " ".join(f"--{name}" if value is True else f"--{name} {value}" for name, value in change.items())
