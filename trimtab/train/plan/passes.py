"""Passes that fit the device, for a run that was not told how large they should be."""

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from trimtab.config.groups import PASS_SIZES
from trimtab.config.rl_jobs import RLOptions
from trimtab.data.prompts import PromptStore
from trimtab.distributed.device import Device
from trimtab.distributed.world import World
from trimtab.models.hugging_face import first_line
from trimtab.models.load import TrainedModelOptions
from trimtab.train.plan.hardware import GIB, of_device
from trimtab.train.plan.work import Rows, Work, rl_work
from trimtab.train.task import Task

if TYPE_CHECKING:
    from trimtab.train.plan.plan import Plan

Job = TypeVar("Job", bound=TrainedModelOptions)


def with_planned_passes(
    options: Job, device: Device, world: World, work: Callable[[], Work]
) -> tuple[Job, "Plan | None"]:
    """The options with the plan's token budget and the plan; or as they are and None. Over several processes, where
    passes are not planned, only what cannot be done at all is refused."""
    if isinstance(options, RLOptions) and options.ray:
        return options, None  # this process is on none of the devices; `trimtab plan --nodes` knows them
    if isinstance(options, RLOptions) and world.size > 1:
        from trimtab.train.plan.gathering import refuse_ungatherable

        refuse_ungatherable(options, device, world.size)
    proposed = is_wanted(options, device, world)
    if not proposed and options.fit_memory:
        world.say("warning: --fit_memory has no effect over several processes: one device is planned for")
    if not proposed and not (options.plans_recomputation and can_be_planned(options, world)):
        if options.plans_recomputation:
            world.say("all layers recompute: how many must is planned for one device alone")
        return options, None
    from trimtab.train.plan.plan import make_plan  # a second of imports

    try:
        plan = make_plan(options, of_device(device), work(), propose=proposed)
    except Exception as error:  # no fault of the plan may keep a run from starting that did not ask for one
        if options.fit_memory:
            raise
        world.say(f"memory is not planned ({first_line(error)}); passes of {options.micro_train_batch_size} samples")
        return options, None
    tokens, room = plan.memory.tokens, f"{plan.memory_gib:.1f} of {plan.hardware.memory / GIB:.1f} GiB"
    warning = "" if plan.fits else "warning: little memory is left, or none; trimtab plan says what it is for; "
    how = f" in which {recomputation}" if (recomputation := plan.recomputation()) else ""
    world.say(f"{warning}passes of up to {tokens:,} tokens{how}, by plan: {room} at the peak")
    changes = plan.changes() | ({"fit_memory": False} if proposed else {})
    return dataclasses.replace(options, **changes), plan


def is_wanted(options: TrainedModelOptions, device: Device, world: World) -> bool:
    """Whether the plan, and not the options, says how large a pass is."""
    if options.fit_memory is not None or world.size > 1 or options.trainer == "tail":
        return bool(options.fit_memory) and world.size == 1
    return device.is_accelerator and not options.given & PASS_SIZES


def can_be_planned(options: TrainedModelOptions, world: World) -> bool:
    return world.size == 1 and options.trainer != "tail"


def supervised_work(task: Task) -> Work:
    """Steps as they will come: the largest of them needs the most memory."""
    lengths, order = task.lengths(task.store), task.order()
    step = max(int(lengths[order.step_samples(step)].sum()) for step in range(order.steps))
    return Work(Rows(0, task.longest()), step, int(lengths.max()))


def work_of_prompts(options: RLOptions, stores: dict[str, PromptStore]) -> Work:
    return rl_work(options, max(int(store.lengths.max()) for store in stores.values()))


def for_manifest(plan: "Plan | None") -> dict[str, float]:
    if plan is None:
        return {}
    found: dict[str, float] = {"planned_memory_gib": plan.memory_gib}
    return found if plan.memory.recomputed is None else found | {"recomputing_layers": plan.memory.recomputed}
