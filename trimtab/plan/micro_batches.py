"""Default token budgets of micro-batches: planned from memory on an accelerator, a fixed number on a CPU."""

import dataclasses
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from trimtab.config.rl_jobs import RLOptions
from trimtab.config.training_options import PASS_SIZES, PER_DEVICE
from trimtab.data.prompts import PromptDataset
from trimtab.distributed.device import Device
from trimtab.distributed.process_group import World
from trimtab.errors import UserError
from trimtab.models.load import TrainedModelOptions
from trimtab.models.pretrained import first_line
from trimtab.plan.hardware import GIB, ClusterHardware, Hardware, of_device
from trimtab.plan.workload import TOKENS_ON_CPU, Work, budget_changes, packs_by_tokens, rl_work, supposed

if TYPE_CHECKING:
    from trimtab.plan.planner import Plan

Job = TypeVar("Job", bound=TrainedModelOptions)


def with_planned_micro_batches(
    options: Job, device: Device, world: World, work: Callable[[], Work]
) -> tuple[Job, "Plan | None"]:
    """The options with the plan's token budget, and the plan; or the options unchanged and None. Micro-batches over
    several
    processes are not planned; only jobs that cannot fit at all are refused."""
    if isinstance(options, RLOptions) and options.ray:
        return options, None  # this process has none of the devices; `trimtab plan --nodes` plans them
    if isinstance(options, RLOptions) and world.size > 1:
        refuse_ungatherable(options, of_device(device), world.size)
    proposed = is_wanted(options, device, world)
    if not proposed and options.fit_memory:
        world.say("warning: --fit_memory has no effect over several processes: one device is planned for")
    if not proposed and not (options.plans_recomputation and world.size == 1 and options.trainer != "tail"):
        if options.plans_recomputation:
            world.say("all layers recompute: how many must is planned for one device alone")
        return options, None
    from trimtab.plan.planner import make_plan  # a second of imports

    try:
        plan = make_plan(options, of_device(device), work(), propose=proposed)
    except Exception as error:  # a failed plan must not stop a run that did not ask for one
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
    """Whether the plan, and not the options, sets the micro-batch size."""
    if options.fit_memory is not None or world.size > 1 or options.trainer == "tail":
        return bool(options.fit_memory) and world.size == 1
    return device.is_accelerator and not options.given & PASS_SIZES


def refuse_ungatherable(options: RLOptions, hardware: Hardware, processes: int) -> None:
    """Refuse, before anything is loaded, a sharded RL job whose processes cannot hold the policy's gathered weights,
    which
    the built-in engine needs, in addition to their shards."""
    from trimtab.plan.planner import Planner, advice, fitting_changes, flag_changes

    machines = ClusterHardware(dataclasses.replace(hardware, program=0), 1, processes)
    planner = Planner(options, machines, supposed(options), propose=False)

    def needed(change: dict[str, Any]) -> tuple[int, int]:
        process = planner.changed(**change).bare_process()
        gathered = process.gathered_to_answer()[0].size
        return gathered, gathered + sum(part.size for part in process.state if "rollout" in part.phases)

    try:
        gathered, every = needed({})
    except UserError:  # a failed estimate must not stop a run: its own checks have better messages
        return
    if every <= hardware.memory:
        return
    ways = list(flag_changes(options, processes, accelerator=hardware.accelerator))
    found = fitting_changes(ways, lambda change: needed(change)[1], hardware.memory)
    tensor = options.ds_tensor_parallel_size
    share = "all" if tensor == 1 else f"1 / {tensor}"
    raise UserError(
        f"--pretrain {options.pretrain}: to answer, every process gathers {share} of the "
        f"policy's weights, {gathered / GIB:.1f} GiB, and holds {(every - gathered) / GIB:.1f} GiB besides, of "
        f"{hardware.memory / GIB:.1f} GiB ({hardware.name}); {advice(found)}"
    )


def uses_default_tokens(options: TrainedModelOptions, device: Device) -> bool:
    """Whether micro-batches have the default number of tokens: on a CPU, if no option sets their size."""
    if device.is_accelerator or options.fit_memory is not None or options.given & (PASS_SIZES | PER_DEVICE):
        return False
    if isinstance(options, RLOptions) and options.ray:  # the devices are on other machines
        return False
    return options.trainer == "rl" or not options.asks("packing_samples")  # which has no effect in RL


def with_default_tokens(options: Job, device: Device, saved: dict[str, int] | None = None) -> Job:
    """The options with the default token budget of micro-batches if it applies; at least one sample's tokens. `saved`:
    the
    micro-batch sizes of the run to resume, which are kept."""
    if not uses_default_tokens(options, device) or (saved is not None and "tokens" not in saved):
        return options
    longest = math.ceil(supposed(options).least / options.ring_attn_size)
    tokens = max(TOKENS_ON_CPU, longest) if saved is None else saved["tokens"]
    return dataclasses.replace(options, **budget_changes(options, tokens))


def without_tokens(options: Job) -> Job:
    """The options with micro-batches limited by samples: tokens do not bound the memory of padded rows."""
    return dataclasses.replace(options, **budget_changes(options, None))


def micro_batch_sizes(options: TrainedModelOptions, *, packed: bool) -> dict[str, int]:
    """The micro-batch size for the manifest. `packed`: whether the model takes packed rows."""
    by_tokens = packs_by_tokens(options) and (packed or isinstance(options, RLOptions))
    if by_tokens and options.train_max_tokens_per_gpu is not None:
        return {"tokens": options.train_max_tokens_per_gpu}
    return {"samples": options.micro_train_batch_size}


def default_line(options: TrainedModelOptions) -> str:
    """The log line about the default number of tokens."""
    return f"passes of up to {options.train_max_tokens_per_gpu:,} tokens; --micro_train_batch_size cuts by samples"


def work_of_prompts(options: RLOptions, stores: dict[str, PromptDataset]) -> Work:
    return rl_work(options, max(int(store.lengths.max()) for store in stores.values()))


def for_manifest(plan: "Plan | None") -> dict[str, Any]:
    if plan is None:
        return {}
    found = {"planned_memory_gib": plan.memory_gib}
    return found if plan.memory.recomputed is None else found | {"recomputing_layers": plan.memory.recomputed}
