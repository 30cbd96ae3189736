"""Plans: what a job needs in each process, whether it fits, how large its micro-batches may be, how long a step takes;
and on machines, which layout to take.

A plan for one device or for the processes of a launcher keeps the options' layout. On machines every layout is tried
that the options leave open: the fastest that fits is proposed.
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

# The options by which models of a plan, and their passes, differ.
_OF_MODELS = (
    *("ds_tensor_parallel_size", "gradient_checkpointing", "offload_activations", "bf16", "lora_rank"),
    "ref_reward_offload",
)
ENGINE_FILL = 0.6  # of an engine's share of memory that its weights may take, or keys and values have no room
AS_ASKED = "as the options say"
PLACING = (
    *(f"{role}_num_{what}" for role in ROLES for what in ("nodes", "gpus_per_node")),
    *("colocate_actor_ref", "colocate_critic_reward", "colocate_all_models", "vllm_num_engines"),
)
ROUND = 1024  # tokens: a proposal need not be odd
NAMED_FLAGS = 3  # at most this many sufficient flags are named
Change = dict[str, Any]


@dataclass(frozen=True)
class Candidate:
    """A layout and what it needs."""

    kind: str
    options: TrainedModelOptions
    pools: dict[str, tuple[ProcessMemory, Memory]]
    """What a process of each pool holds, and its parts with the micro-batches that were chosen."""
    time: StepTime | None
    changes: Change = field(default_factory=dict)
    """The options that ask for the layout of a supervised job, and"""
    layout: Layout | None = None
    """the layout of an RL job."""
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
    """The fastest that fits, else what comes nearest."""
    fitting = [found for found in tried if found.fits]
    return min(fitting, key=lambda found: found.whole) if fitting else min(tried, key=lambda found: found.peak)


class Planner:
    """Tries layouts of one job on some machines."""

    def __init__(
        self,
        options: TrainedModelOptions,
        machines: ClusterHardware,
        work: Work,
        *,
        propose: bool,
        models: dict[tuple, list[PlannedModel]] | None = None,
    ):
        """`propose`: the plan chooses the size of micro-batches, not the options."""
        self.options, self.machines, self.work, self.propose = options, machines, work, propose
        self._models = {} if models is None else models

    def changed(self, machines: ClusterHardware | None = None, **settings: Any) -> "Planner":
        """The same job under other options, or on other machines: what was measured is kept."""
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
        """None: nothing is known of how fast the devices are, or the links between them."""
        hardware, several = self.machines.hardware, self.machines.devices > 1
        unknown = hardware.flops(self.options.bf16) is None or hardware.bandwidth is None
        if unknown or (several and self.machines.network == float("inf")):
            return None
        return TimeModel(self.options, self.machines, self.work, self.models)

    def process(self, units: Sequence[str] | None, processes: int, **engine: Any) -> ProcessMemory:
        """Of a pool with these units; None: all."""
        models = [model for model in self.models if units is None or model.role in units]
        split = Split.of(self.options, processes)
        return ProcessMemory(self.options, self.machines.hardware, self.work, split, models, **engine)

    def _micro_batches(self, held: ProcessMemory) -> Memory:
        if held.split.processes == self.machines.devices == 1:
            tokens = None if self.propose else given_budget(self.options, self.work)
            return fastest_micro_batches(held, self.clock, tokens)
        return held.largest_doubling() if self.propose else held.at(given_budget(self.options, self.work))

    # ---- one pool: one device, the processes of a launcher, a supervised job on machines

    def bare_process(self) -> ProcessMemory:
        """Without an engine; of a run of a launcher, a process that holds the policy."""
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
        """Every layout of a supervised job."""
        found = []
        for change in split_candidates(self.options, self.machines, self.work, self.models[0].whole.model.config):
            # A UserError: these options do not go together, or not on this many devices; or a model beside the trained
            # one is of a family that cannot be cut.
            with contextlib.suppress(UserError):
                found.append(self.changed(**change).one_pool(changes=change))
        return found

    def split_as_asked(self) -> Candidate | None:
        """The layout of the options, if they name one."""
        if not self.options.given & set(SPLITTING):
            return None
        return self.one_pool(AS_ASKED, {name: getattr(self.options, name) for name in SPLITTING})

    # ---- an RL job on a cluster

    @property
    def units(self) -> list[str]:
        roles = {model.role for model in self.models}
        return [unit for unit in UNITS if unit in roles]

    def least_tensor_parallel(self) -> int:
        """Devices over which an engine's weights must be split."""
        room = ENGINE_FILL * FILL * self.machines.hardware.memory
        sizes = [size for size in range(1, self.machines.gpus + 1) if self.machines.gpus % size == 0]
        return next((size for size in sizes if self.models[0].weights / size <= room), sizes[-1])

    def tried(self, kind: str, layout: Layout, *, sleep: bool) -> Candidate:
        """`sleep`: engines and models on the same devices make room for each other."""
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
        """An engine beside models takes what they leave it, unless the options say how much."""
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
        """The layout of the options, if they name one."""
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


# ---- the size of micro-batches on one device
#
# Larger passes are faster until matrix products fill the device and the host keeps ahead of it; beyond that they only
# take memory. Where that size does not fit, there are smaller ones and, if the options leave it open, layers that
# recompute: of these as few as fit, with the micro-batches that then take the least time.


def fastest_micro_batches(held: ProcessMemory, clock: TimeModel | None, tokens: int | None) -> Memory:
    """`tokens`: of a micro-batch as the options have it; None: the plan chooses."""
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
    """Tokens of a micro-batch beyond which nothing is gained: at least one sample's, and no more than a step has."""
    enough = MOST_TOKENS
    if clock is not None and clock.accelerator:
        enough = max(-(-clock.enough(model) // ROUND) * ROUND for model in held.learners)
    rows, step = held.work.rows, held.work.tokens
    enough = max(enough, rows.prompt + rows.group * rows.answer)  # of a group: its prompt is then read once
    # As many passes as that takes, all of about the same size: the last one would be as slow as a small one is.
    passes = max(1, round(step / min(enough, MOST_TOKENS)))
    even = step if passes == 1 else -(-step // passes) + held.work.least
    return max(held.work.least, min(step, even, MOST_TOKENS))


def fewest_recomputed(held: ProcessMemory, tokens: int) -> Memory:
    """The fewest layers with which micro-batches of `tokens` tokens fit; all, if no number does."""
    fewest = bisect_left(range(held.layers), True, key=lambda number: held.at(tokens, number).fits(held.room))
    return held.at(tokens, fewest)


def update_seconds(held: ProcessMemory, clock: TimeModel | None, memory: Memory) -> float:
    """Of an update; of an unknown device, in arbitrary units."""
    assert memory.recomputed is not None
    if clock is None:
        return 1 + memory.recomputed / held.layers / 3
    return sum(clock.update(model, held.split, held.work.tokens, 1, memory).whole for model in held.learners)


def largest(at: Callable[[int], Memory], room: int, least: int, most: int) -> Memory:
    """Nearly the most tokens whose peak is at most `room`; `least` if there are none."""
    high = at(most)
    if high.peak <= room:
        return high
    low = at(least)
    # Memory is a rising, convex function of the tokens, so a chord's crossing of `room` fits and comes closer.
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
    planner: Planner
    shown: Candidate
    """Whose memory is printed part by part: as the options say, or what is proposed."""
    asked: Candidate | None = None
    proposed: Candidate | None = None
    """On machines; else the plan keeps the options' layout."""
    candidates: list[Candidate] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.options, self.hardware = self.planner.options, self.planner.machines.hardware
        self.held, self.memory = self.shown.first
        self.memory_gib, self.fits, self.time = self.memory.peak / GIB, self.shown.fits, self.shown.time

    def recomputation(self) -> str:
        """What was chosen, in words; empty where the options say it."""
        if self.memory.recomputed is None:
            return ""
        verb = "recomputes" if self.memory.recomputed == 1 else "recompute"
        return f"{self.memory.recomputed or 'none'} of {self.held.layers} layers {verb}"

    def changes(self) -> Change:
        """Options, for what was chosen here."""
        own = -(-self.memory.tokens // self.shown.split.context)  # a process's part of a row
        found = budget_changes(self.options, own) if self.planner.propose else {}
        match self.memory.recomputed:
            case None:
                return found
            case 0:
                return found | {"gradient_checkpointing": False, "gradient_checkpointing_layers": None}
            case number:
                return found | {"gradient_checkpointing_layers": None if number == self.held.layers else number}

    def flags_that_fit(self) -> str:
        """Which flags would make it fit."""
        planner = self.planner
        known = flag_changes(self.options, planner.machines.devices, accelerator=self.hardware.accelerator)
        ways = [way for way in known if not (planner.propose and way.keys() & PASS_SIZES)]
        peak = lambda change: planner.changed(**change).one_pool().peak  # noqa: E731
        return advice(fitting_changes(ways, peak, self.held.room))


def make_plan(
    options: TrainedModelOptions, hardware: Hardware, work: Work, processes: int = 1, *, propose: bool
) -> Plan:
    """For one device, or for `processes` of one machine as the options split the job over them. `hardware`: its memory
    is what one process has."""
    refuse_unplannable(options)
    planner = Planner(options, ClusterHardware(hardware, 1, processes), work, propose=propose)
    with _planning(options):
        return Plan(planner, planner.one_pool())


def plan_layouts(options: TrainedModelOptions, machines: ClusterHardware) -> Plan:
    """Layouts, and which of them to take: of all roles in RL, of the one model that is trained elsewhere."""
    refuse_unplannable(options)
    machines.require_links()
    if isinstance(options, RLOptions):  # layouts of roles: how a model is split is not compared here
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
    except RuntimeError as error:  # a model that looks at contents, and here there are none
        raise UserError(f"--pretrain {options.pretrain} cannot be planned: {first_line(error)}") from error


# ---- flags that make a job fit: each is tried, in the order of what it costs


def flag_changes(options: TrainedModelOptions, processes: int, *, accelerator: bool) -> Iterator[Change]:
    """The cheapest first: more passes, more gathering, a third more arithmetic, processes that wait for each other in
    every layer, main memory; and last what changes what is learnt."""
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
    if not options.bf16 and not accelerator:  # may be slow there
        yield {"bf16": True}
    if not options.lora_rank:
        yield {"lora_rank": 16}


def fitting_changes(ways: list[Change], peak: Callable[[Change], int], room: int) -> list[Change]:
    """Single changes that each suffice; where none does, one set of them that does; empty: nothing here does.

    `peak`: bytes that a process needs with these options, or a UserError: they do not go together.
    """

    def needed(change: Change) -> int | None:
        try:
            return peak(change)
        except UserError:
            return None

    found = [(way, size) for way in ways if (size := needed(way)) is not None]
    enough = [way for way, size in found if size <= room]
    if enough:  # of one flag only the smallest value that is enough
        return list({tuple(way): way for way in reversed(enough)}.values())[::-1][:NAMED_FLAGS]
    together: Change = {}
    for way, _ in found:
        size = needed(together | way)
        if size is None:
            continue
        together |= way
        if size <= room:
            for name in reversed(list(together)):  # without what is not needed after all, the dearest first
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
