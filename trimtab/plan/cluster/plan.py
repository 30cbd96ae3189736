"""A plan for a cluster: every layout that its machines allow, the best of each kind, and what follows from them."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trimtab.config.placement import ROLES
from trimtab.config.rl_jobs import RLOptions
from trimtab.distributed.ray.placement import Layout
from trimtab.errors import UserError
from trimtab.models.pretrained import first_line
from trimtab.plan.cluster.candidates import UNITS, candidates
from trimtab.plan.cluster.iteration import Iteration, Timing, activation_bytes
from trimtab.plan.cluster.shares import EngineShare, Share, Shares
from trimtab.plan.hardware import Machines
from trimtab.plan.layouts import layout_of
from trimtab.plan.memory import FILL
from trimtab.plan.models import PlannedModel, planned_models
from trimtab.plan.plan import refuse_unplannable
from trimtab.plan.speed import COUNTED_TOKENS, SPLIT, Clock
from trimtab.plan.workload import supposed

ENGINE_FILL = 0.6  # of an engine's share of memory that its weights may take, or keys and values have no room
AS_ASKED = "as the options say"
PLACED = tuple(f"{role}_num_{what}" for role in ROLES for what in ("nodes", "gpus_per_node"))
PLACING = (*PLACED, "colocate_actor_ref", "colocate_critic_reward", "colocate_all_models", "vllm_num_engines")


@dataclass(frozen=True)
class Tried:
    """A layout and what it needs."""

    kind: str
    layout: Layout
    pools: dict[str, Share]
    engine: EngineShare
    iteration: Iteration

    @property
    def fits(self) -> bool:
        return self.engine.fits and all(share.fits for share in self.pools.values())

    @property
    def whole(self) -> float:
        return self.iteration.whole


class Planner:
    """One job on some machines. `changed` makes one for the same job with other options: what was measured is kept."""

    def __init__(self, options: RLOptions, machines: Machines, models: Sequence[PlannedModel] | None = None):
        self.options, self.machines, self.work = options, machines, supposed(options)
        self.models = planned_models(options, self.work.rows) if models is None else models
        self.shares = Shares(options, machines, self.work, self.models)
        hardware = machines.hardware
        flops, bandwidth = hardware.flops(options.bf16), hardware.bandwidth
        assert flops is not None and bandwidth is not None
        counted = min(COUNTED_TOKENS, self.work.tokens)
        kept = activation_bytes(self.shares.actor, counted)
        self.timing = Timing(self.shares, Clock(SPLIT, flops, bandwidth, options, self.work, kept))

    def changed(self, **settings: Any) -> "Planner":
        """With options that change no pass of a model."""
        options = dataclasses.replace(self.options, **settings)
        return Planner(options, self.machines, self.models)

    @property
    def units(self) -> list[str]:
        roles = {model.role for model in self.models}
        return [unit for unit in UNITS if unit in roles]

    def least_tensor_parallel(self) -> int:
        """Devices over which an engine's weights must be split."""
        room = ENGINE_FILL * FILL * self.machines.hardware.memory
        sizes = [size for size in range(1, self.machines.gpus + 1) if self.machines.gpus % size == 0]
        return next((size for size in sizes if self.shares.actor.weights / size <= room), sizes[-1])

    def tried(self, kind: str, layout: Layout, *, sleep: bool) -> Tried:
        """`sleep`: engines and models on the same devices make room for each other."""
        shares, engines = self.shares, layout.engines
        hybrid = engines is not None and engines.pool is not None
        if engines is None:
            engine = shares.of_builtin(layout)
        elif hybrid:
            engine = shares.of_hybrid(layout, sleep=sleep)
        else:
            engine = shares.of_engine(engines, min(self.options.vllm_gpu_memory_utilization, 0.95))
        near = "actor" if engines is None else engines.pool
        pools = {
            pool.name: shares.of_pool(layout, pool, engine if pool.name == near else None, sleep=sleep and hybrid)
            for pool in layout.pools
        }
        return Tried(kind, layout, pools, engine, self.timing.of(layout, pools, engine, sleep=sleep and hybrid))

    def best_of_each_kind(self) -> list[Tried]:
        """The fastest layout of each kind that fits; where none fits, the one that comes nearest."""
        tensor_parallel = self.least_tensor_parallel()
        if "vllm_tensor_parallel_size" in self.options.given:
            tensor_parallel = self.options.vllm_tensor_parallel_size
        found = []
        for kind, layouts in candidates(self.units, self.machines, tensor_parallel).items():
            tried = [self.tried(kind, layout, sleep=True) for layout in layouts]
            if tried:
                found.append(best(tried))
        return found

    def as_asked(self) -> Tried | None:
        """The layout of the options, if they name one."""
        if not self.options.given & set(PLACING):
            return None
        layout = layout_of(dataclasses.replace(self.options, ray=True), self.units)
        if layout.devices > self.machines.devices:
            raise UserError(
                f"the options ask for {layout.devices} devices, and --nodes {self.machines.nodes} --gpus "
                f"{self.machines.gpus} are {self.machines.devices}"
            )
        sleep = self.options.vllm_enable_sleep and self.options.deepspeed_enable_sleep
        return self.tried(AS_ASKED, layout, sleep=sleep)


def best(tried: Sequence[Tried]) -> Tried:
    fitting = [found for found in tried if found.fits]
    if fitting:
        return min(fitting, key=lambda found: found.whole)
    return min(tried, key=lambda found: max(share.memory.peak for share in found.pools.values()))


@dataclass(frozen=True)
class ClusterPlan:
    planner: Planner
    asked: Tried | None
    kinds: list[Tried]

    @property
    def tried(self) -> list[Tried]:
        return [*([self.asked] if self.asked else []), *self.kinds]

    @property
    def shown(self) -> Tried:
        """The one whose memory is told part by part: that of the options, or the best."""
        return self.asked or best(self.kinds)


def plan_cluster(options: RLOptions, machines: Machines) -> ClusterPlan:
    refuse_unplannable(options)
    try:
        planner = Planner(options, machines)
        return ClusterPlan(planner, planner.as_asked(), planner.best_of_each_kind())
    except RuntimeError as error:  # a model that looks at contents, and here there are none
        raise UserError(f"--pretrain {options.pretrain} cannot be planned: {first_line(error)}") from error
