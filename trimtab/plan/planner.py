"""Plans: memory of each process, whether a job fits, micro-batch size, time of a step and, on machines, the layout.

A plan for one device or for the processes of a launcher keeps the options' layout. On machines all layouts that the
options leave open are tried, and the fastest that fits is proposed.
"""

import contextlib
import dataclasses
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from trimtab.config.placement_options import ROLES
from trimtab.config.rl_jobs import RLOptions
from trimtab.config.training_options import PASS_SIZES
from trimtab.distributed.ray.placement import Layout
from trimtab.errors import UserError
from trimtab.models.load import TrainedModelOptions
from trimtab.models.pretrained import first_line
from trimtab.plan.fake_model import PlannedModel, planned_models
from trimtab.plan.hardware import GIB, ClusterHardware, Hardware
from trimtab.plan.layouts import SPLITTING, UNITS, Split, cluster_candidates, layout_of, split_candidates
from trimtab.plan.memory import FILL, MOST_TOKENS, EngineShare, Memory, ProcessMemory, vllm_share
from trimtab.plan.speed import StepTime, TimeModel
from trimtab.plan.workload import Work, budget_changes, given_budget, packs_by_tokens, refuse_unplannable, supposed

# Options that change the models of a plan or the memory of their passes: the key of the cache.
_OF_MODELS = (
    *("ds_tensor_parallel_size", "gradient_checkpointing", "offload_activations", "bf16", "lora_rank"),
    "ref_reward_offload",
)
ENGINE_FILL = 0.6  # most of an engine's memory that its weights may take, to leave space for the KV cache
AS_ASKED = "as the options say"
PLACING = (
    *(f"{role}_num_{what}" for role in ROLES for what in ("nodes", "gpus_per_node")),
    *("colocate_actor_ref", "colocate_critic_reward", "colocate_all_models", "vllm_num_engines"),
)
ROUND = 1024  # proposals are multiples of this many tokens
NAMED_FLAGS = 3  # at most this many sufficient flags are listed
Change = dict[str, Any]


@dataclass(frozen=True)
class Candidate:
    """A layout with its memory and time."""

    kind: str
    options: TrainedModelOptions
    pools: dict[str, tuple[ProcessMemory, Memory]]
    """For each pool: the memory model of a process, and its parts with the chosen micro-batches."""
    time: StepTime | None
    changes: Change = field(default_factory=dict)
    """The options that select this layout of a supervised job."""
    layout: Layout | None = None
    """The layout of an RL job."""
    engine: EngineShare | None = None

    @property
    def fits(self) -> bool:
        engine = self.layout is None or self.engine is None or self.engine.fits
        return engine and all(memory.fits(held.room) for held, memory in self.pools.values())

    @property
    def whole(self) -> float:
        assert self.time is not None
        return self.time.whole

    @property
    def peak(self) -> int:
        return max(memory.peak for _, memory in self.pools.values())

    @property
    def first(self) -> tuple[ProcessMemory, Memory]:
        return next(iter(self.pools.values()))

    @property
    def split(self) -> Split:
        return self.first[0].split


def best(tried: Sequence[Candidate]) -> Candidate:
    """The fastest candidate that fits, otherwise the one with the lowest peak."""
    fitting = [found for found in tried if found.fits]
    return min(fitting, key=lambda found: found.whole) if fitting else min(tried, key=lambda found: found.peak)


class Planner:
    """Evaluates layouts of one job on given machines."""

    def __init__(
        self,
        options: TrainedModelOptions,
        machines: ClusterHardware,
        work: Work,
        *,
        propose: bool,
        models: dict[tuple, list[PlannedModel]] | None = None,
    ):
        """`propose`: the plan chooses the micro-batch size, not the options."""
        self.options, self.machines, self.work, self.propose = options, machines, work, propose
        self._models = {} if models is None else models

    def changed(self, machines: ClusterHardware | None = None, **settings: Any) -> "Planner":
        """The same job with other options, or on other machines; measured models are reused."""
        options = dataclasses.replace(self.options, **settings)
        return Planner(options, machines or self.machines, self.work, propose=self.propose, models=self._models)

    @cached_property
    def models(self) -> list[PlannedModel]:
        key = tuple(getattr(self.options, name, None) for name in _OF_MODELS)
        if key not in self._models:
            accelerator, tensor = self.machines.hardware.accelerator, self.options.ds_tensor_parallel_size
            self._models[key] = planned_models(self.options, self.work.rows, tensor=tensor, accelerator=accelerator)
        return self._models[key]

    @cached_property
    def clock(self) -> TimeModel | None:
        """The time model; None if the speed of the devices or of their links is unknown."""
        hardware, several = self.machines.hardware, self.machines.devices > 1
        unknown = hardware.flops(self.options.bf16) is None or hardware.bandwidth is None
        if unknown or (several and self.machines.network == float("inf")):
            return None
        return TimeModel(self.options, self.machines, self.work, self.models)

    def process(self, units: Sequence[str] | None, processes: int, **engine: Any) -> ProcessMemory:
        """Memory model of a process in a pool with these units; None: all units."""
        models = [model for model in self.models if units is None or model.role in units]
        split = Split.of(self.options, processes)
        return ProcessMemory(self.options, self.machines.hardware, self.work, split, models, **engine)

    def _micro_batches(self, held: ProcessMemory) -> Memory:
        if held.split.processes == self.machines.devices == 1:
            tokens = None if self.propose else given_budget(self.options, self.work)
            return fastest_micro_batches(held, self.clock, tokens)
        return held.largest_doubling() if self.propose else held.at(given_budget(self.options, self.work))

    # ---- one pool: one device, processes of a launcher, or a supervised job on machines

    def bare_process(self) -> ProcessMemory:
        """A process without an engine; under a launcher, one that has the policy."""
        processes, sizes = self.machines.devices, {}
        if isinstance(self.options, RLOptions):
            sizes = self.options.group_sizes(processes)
            processes = sizes["actor"]
        return self.process(None, processes, sizes=sizes)

    def one_pool(self, kind: str = "", changes: Change | None = None) -> Candidate:
        options, held = self.options, self.bare_process()
        if isinstance(options, RLOptions):
            held.add_builtin_engine()
        memory = self._micro_batches(held)
        time = None if self.clock is None else self.clock.step([(held, memory)], held.engine)
        return Candidate(kind, options, {"": (held, memory)}, time, changes or {}, engine=held.engine)

    @cached_property
    def splits(self) -> list[Candidate]:
        """All layouts of a supervised job."""
        found = []
        for change in split_candidates(self.options, self.machines, self.work, self.models[0].whole.model.config):
            # UserError: these options are incompatible, with each other or with this many devices; or another model
            # cannot be split by tensor parallelism.
            with contextlib.suppress(UserError):
                found.append(self.changed(**change).one_pool(changes=change))
        return found

    def split_as_asked(self) -> Candidate | None:
        """The layout of the options, if they set one."""
        if not self.options.given & set(SPLITTING):
            return None
        return self.one_pool(AS_ASKED, {name: getattr(self.options, name) for name in SPLITTING})

    # ---- an RL job on a cluster

    @property
    def units(self) -> list[str]:
        roles = {model.role for model in self.models}
        return [unit for unit in UNITS if unit in roles]

    def least_tensor_parallel(self) -> int:
        """The least number of devices over which an engine's weights must be split."""
        room = ENGINE_FILL * FILL * self.machines.hardware.memory
        sizes = [size for size in range(1, self.machines.gpus + 1) if self.machines.gpus % size == 0]
        return next((size for size in sizes if self.models[0].weights / size <= room), sizes[-1])

    def tried(self, kind: str, layout: Layout, *, sleep: bool) -> Candidate:
        """Evaluate a layout; `sleep`: engines and models on the same devices are offloaded in turn."""
        engines = layout.engines
        hybrid = engines is not None and engines.pool is not None
        sleep = sleep and hybrid
        engine = None if engines is None else self._vllm(layout, sleep=sleep)
        pools: dict[str, tuple[ProcessMemory, Memory]] = {}
        for pool in layout.pools:
            near = engines is not None and engines.pool == pool.name
            held = self.process(pool.units, pool.size, engine=engine if near else None, sleep=sleep)
            if engines is None and "actor" in pool.units:
                held.add_builtin_engine()
                engine = held.engine
            pools[pool.name] = held, self._micro_batches(held)
        assert engine is not None and self.clock is not None
        time = self.clock.step(list(pools.values()), engine, layout, sleep=sleep)
        return Candidate(kind, self.options, pools, time, layout=layout, engine=engine)

    def _vllm(self, layout: Layout, *, sleep: bool) -> EngineShare:
        """Memory of an engine. On the devices of models it gets what they leave, unless the options set its share."""
        options, engines, hardware = self.options, layout.engines, self.machines.hardware
        assert isinstance(options, RLOptions) and engines is not None
        utilization = min(options.vllm_gpu_memory_utilization, 0.95)
        if engines.pool is not None and "vllm_gpu_memory_utilization" not in options.given:
            first = layout.pools[0]
            beside = self._micro_batches(self.process(first.units, first.size, sleep=sleep))
            taken = beside.during("rollout") if sleep else beside.peak
            utilization = int(20 * max(0.0, FILL - taken / hardware.memory)) / 20
        return vllm_share(engines, options, hardware, self.work, self.models[0], utilization)

    def best_per_kind(self) -> list[Candidate]:
        tensor_parallel = self.least_tensor_parallel()
        if isinstance(self.options, RLOptions) and "vllm_tensor_parallel_size" in self.options.given:
            tensor_parallel = self.options.vllm_tensor_parallel_size
        kinds = cluster_candidates(self.units, self.machines, tensor_parallel)
        tried = [[self.tried(kind, layout, sleep=True) for layout in layouts] for kind, layouts in kinds.items()]
        return [best(found) for found in tried if found]

    def cluster_as_asked(self) -> Candidate | None:
        """The layout of the options, if they set one."""
        options = self.options
        assert isinstance(options, RLOptions)
        if not options.given & set(PLACING):
            return None
        layout = layout_of(dataclasses.replace(options, ray=True), self.units)
        if layout.devices > self.machines.devices:
            raise UserError(
                f"the options ask for {layout.devices} devices, and --nodes {self.machines.nodes} --gpus "
                f"{self.machines.gpus} are {self.machines.devices}"
            )
        return self.tried(AS_ASKED, layout, sleep=options.vllm_enable_sleep and options.deepspeed_enable_sleep)


# ---- micro-batch size on one device
#
# Larger micro-batches are faster until matrix products fill the device and the host stays ahead of it; beyond that they
# only take memory. If that size does not fit, smaller ones are tried and, if the options leave it open, gradient
# checkpointing of some layers: as few as fit, with the micro-batches that then take the least time.


def fastest_micro_batches(held: ProcessMemory, clock: TimeModel | None, tokens: int | None) -> Memory:
    """The micro-batches with the shortest update; `tokens`: the size that the options set; None: the plan chooses."""
    open_layers = held.options.plans_recomputation and held.layers > 0
    if tokens is not None:
        return fewest_recomputed(held, tokens) if open_layers else held.at(tokens)
    least, most = held.work.least, enough_tokens(held, clock)
    if not open_layers:
        return largest(held.at, held.room, least, most)
    found = fewest_recomputed(held, most)
    if found.recomputed == 0:
        return found
    without = largest(lambda size: held.at(size, 0), held.room, least, most)
    while found.tokens > least:
        smaller = fewest_recomputed(held, max(least, found.tokens // 2))
        if found.fits(held.room) and update_seconds(held, clock, smaller) >= update_seconds(held, clock, found):
            break
        found = smaller
    fitting = [memory for memory in (without, found) if memory.fits(held.room)]
    return min(fitting, key=lambda memory: update_seconds(held, clock, memory), default=found)


def enough_tokens(held: ProcessMemory, clock: TimeModel | None) -> int:
    """Micro-batch size above which there is no gain: at least one sample, at most a step."""
    enough = MOST_TOKENS
    if clock is not None and clock.accelerator:
        enough = max(-(-clock.enough(model) // ROUND) * ROUND for model in held.learners)
    rows, step = held.work.rows, held.work.tokens
    enough = max(enough, rows.prompt + rows.group * rows.answer)  # a whole group, whose prompt is then computed once
    # Divide the step into micro-batches of about equal size, since a small last one would be inefficient.
    passes = max(1, round(step / min(enough, MOST_TOKENS)))
    even = step if passes == 1 else -(-step // passes) + held.work.least
    return max(held.work.least, min(step, even, MOST_TOKENS))


def fewest_recomputed(held: ProcessMemory, tokens: int) -> Memory:
    """Gradient checkpointing of the fewest layers with which micro-batches of `tokens` fit; of all, if none fits."""
    fewest = bisect_left(range(held.layers), True, key=lambda number: held.at(tokens, number).fits(held.room))
    return held.at(tokens, fewest)


def update_seconds(held: ProcessMemory, clock: TimeModel | None, memory: Memory) -> float:
    """Seconds of an update; for an unknown device, in arbitrary units."""
    assert memory.recomputed is not None
    if clock is None:
        return 1 + memory.recomputed / held.layers / 3
    return sum(clock.update(model, held.split, held.work.tokens, 1, memory).whole for model in held.learners)


def largest(at: Callable[[int], Memory], room: int, least: int, most: int) -> Memory:
    """Nearly the most tokens whose peak is at most `room`; at least `least`."""
    high = at(most)
    if high.peak <= room:
        return high
    low = at(least)
    # Memory is an increasing convex function of the tokens, so the point where a chord crosses `room` fits.
    while low.peak <= room:
        guess = low.tokens + (room - low.peak) * (high.tokens - low.tokens) // (high.peak - low.peak)
        if guess < low.tokens * 1.02:
            break
        found = at(guess)
        low, high = (found, high) if found.peak <= room else (low, found)
    return low


# ---- plans


@dataclass
class Plan:
    """The result for a job: the candidate to show and, on machines, the proposed one and all that were compared."""

    planner: Planner
    shown: Candidate
    """The candidate whose memory is printed part by part: the options' layout, or the proposed one."""
    asked: Candidate | None = None
    proposed: Candidate | None = None
    """Only on machines; otherwise the plan keeps the options' layout."""
    candidates: list[Candidate] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.options, self.hardware = self.planner.options, self.planner.machines.hardware
        self.held, self.memory = self.shown.first
        self.memory_gib, self.fits, self.time = self.memory.peak / GIB, self.shown.fits, self.shown.time

    def recomputation(self) -> str:
        """The chosen gradient checkpointing as text; empty if the options set it."""
        if self.memory.recomputed is None:
            return ""
        verb = "recomputes" if self.memory.recomputed == 1 else "recompute"
        return f"{self.memory.recomputed or 'none'} of {self.held.layers} layers {verb}"

    def changes(self) -> Change:
        """The options that select the chosen micro-batches and gradient checkpointing."""
        own = -(-self.memory.tokens // self.shown.split.context)  # one process's tokens of a row
        found = budget_changes(self.options, own) if self.planner.propose else {}
        match self.memory.recomputed:
            case None:
                return found
            case 0:
                return found | {"gradient_checkpointing": False, "gradient_checkpointing_layers": None}
            case number:
                return found | {"gradient_checkpointing_layers": None if number == self.held.layers else number}

    def flags_that_fit(self) -> str:
        """A message with the flags that would make the job fit."""
        planner = self.planner
        known = flag_changes(self.options, planner.machines.devices, accelerator=self.hardware.accelerator)
        ways = [way for way in known if not (planner.propose and way.keys() & PASS_SIZES)]
        peak = lambda change: planner.changed(**change).one_pool().peak  # noqa: E731
        return advice(fitting_changes(ways, peak, self.held.room))


def make_plan(
    options: TrainedModelOptions, hardware: Hardware, work: Work, processes: int = 1, *, propose: bool
) -> Plan:
    """A plan for one device, or for `processes` of one machine with the options' layout. `hardware`: with the memory of
    one process."""
    refuse_unplannable(options)
    planner = Planner(options, ClusterHardware(hardware, 1, processes), work, propose=propose)
    with _planning(options):
        return Plan(planner, planner.one_pool())


def plan_layouts(options: TrainedModelOptions, machines: ClusterHardware) -> Plan:
    """Compare layouts on machines: of all roles in RL, of the trained model in other jobs."""
    refuse_unplannable(options)
    machines.require_links()
    if isinstance(options, RLOptions):  # only the placement of roles is compared, not how a model is split
        whole: Change = {"ds_tensor_parallel_size": 1, "ring_attn_size": 1, "shard_size": None, "zpg": 1}
        options = dataclasses.replace(options, **whole)
    planner = Planner(options, machines, supposed(options), propose=not options.given & PASS_SIZES)
    with _planning(options):
        if isinstance(options, RLOptions):
            asked, candidates = planner.cluster_as_asked(), planner.best_per_kind()
        else:
            asked, candidates = planner.split_as_asked(), planner.splits
        proposed = best(candidates)
        return Plan(planner, asked or proposed, asked, proposed, candidates)


@contextlib.contextmanager
def _planning(options: TrainedModelOptions) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # the model's code depends on values, which fake tensors do not have
        raise UserError(f"--pretrain {options.pretrain} cannot be planned: {first_line(error)}") from error


# ---- flags that make a job fit, tried in the order of their cost


def flag_changes(options: TrainedModelOptions, processes: int, *, accelerator: bool) -> Iterator[Change]:
    """Changes that save memory, cheapest first: more micro-batches, more gathering, a third more arithmetic,
    communication in every layer, offload to main memory; and last options that change the results."""
    if not options.bf16 and accelerator:
        yield {"bf16": True}
    if not packs_by_tokens(options) and options.micro_train_batch_size > 1:
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
    if not options.bf16 and not accelerator:  # may be slow on a CPU
        yield {"bf16": True}
    if not options.lora_rank:
        yield {"lora_rank": 16}


def fitting_changes(ways: list[Change], peak: Callable[[Change], int], room: int) -> list[Change]:
    """Single changes that each suffice; if none does, one combination that does; empty: nothing suffices.

    `peak`: returns the bytes a process needs with a change, or raises UserError for incompatible options.
    """

    def needed(change: Change) -> int | None:
        try:
            return peak(change)
        except UserError:
            return None

    found = [(way, size) for way in ways if (size := needed(way)) is not None]
    enough = [way for way, size in found if size <= room]
    if enough:  # for each flag only the smallest value that suffices
        return list({tuple(way): way for way in reversed(enough)}.values())[::-1][:NAMED_FLAGS]
    together: Change = {}
    for way, _ in found:
        size = needed(together | way)
        if size is None:
            continue
        together |= way
        if size <= room:
            for name in reversed(list(together)):  # drop changes that are not needed after all, the most costly first
                without = {other: value for other, value in together.items() if other != name}
                if without and (needed(without) or room + 1) <= room:
                    together = without
            return [together]
    return []


def advice(found: list[Change]) -> str:
    if not found:
        return "no flag makes it fit: more processes, larger devices or a smaller model would"
    return f"try {', '.join(' '.join(flags(change)) for change in found)}, or a smaller model"


def flags(change: Change) -> list[str]:
    return [f"--{name}" if value is True else f"--{name} {value}" for name, value in change.items()]
