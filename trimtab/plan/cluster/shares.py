"""Memory of one device: its share of every model that its pool holds, the passes, and an engine that is there too.

    --zero_stage 0     everything whole
    --zero_stage 1, 2  masters, moments and gradients are split; the working weights are whole
    --zero_stage 3     working weights too: the embedding, the head and two layers are whole at a time

Small models keep whole gradient sums between the passes of a step; those of others, and of a step that is one pass,
are split layer by layer (distributed/sharding).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from trimtab.config.rl_jobs import RLOptions
from trimtab.distributed.fsdp import GRADIENT_DTYPES, keeps_whole_sums
from trimtab.distributed.ray.placement import Engines, Layout, Pool
from trimtab.plan.hardware import Machines
from trimtab.plan.memory import FILL, MOST_TOKENS, PHASES, SAMPLED_COPIES, Memory, Part, total
from trimtab.plan.models import PlannedModel
from trimtab.plan.workload import Work, given_budget

LAYERS_IN_HAND = 2  # gathered at a time: the one that works and the next


@dataclass(frozen=True)
class Share:
    """What a device of a pool holds."""

    name: str
    devices: int
    memory: Memory
    passes: int
    """Passes of an optimiser step, of `memory.tokens` at most."""
    room: int

    @property
    def fits(self) -> bool:
        return self.memory.peak <= self.room

    @property
    def busiest(self) -> str:
        return max(PHASES, key=self.memory.during)


@dataclass(frozen=True)
class EngineShare:
    """What an engine has on each of its devices, and how many samples it writes at once."""

    weights: int
    keys_and_values: int
    slots: int
    utilization: float
    """Of a device's memory."""

    @property
    def fits(self) -> bool:
        return self.slots > 0


class Shares:
    def __init__(self, options: RLOptions, machines: Machines, work: Work, models: Sequence[PlannedModel]):
        self.options, self.machines, self.work, self.models = options, machines, work, models
        self.actor = next(model for model in models if model.role == "actor")
        self.kv_token_bytes = self.actor.engine_memory().token_bytes

    def held_by(self, pool: Pool) -> list[PlannedModel]:
        return [model for model in self.models if model.role in pool.units]

    def of_pool(self, layout: Layout, pool: Pool, engine: EngineShare | None, *, sleep: bool) -> Share:
        """`engine`: one that shares these devices; `sleep`: it and the optimiser make room for each other."""
        options, work = self.options, self.work
        tokens = work.tokens // pool.size + (work.tokens % pool.size > 0)
        if options.given & {"micro_train_batch_size", "train_max_tokens_per_gpu"}:
            sizes = [min(given_budget(options, work), tokens)]
        else:
            most = max(1, min(tokens, MOST_TOKENS) // work.least)
            sizes = [work.least * 2**power for power in reversed(range(most.bit_length()))]
            if sizes[0] < tokens <= MOST_TOKENS:
                sizes.insert(0, tokens)  # the whole step in one pass
        away = sleep or layout.engines is None  # the built-in engine gives back what others need
        shared = self._engine(engine, ("rollout",) if away else PHASES) if engine else []
        room = int(FILL * self.machines.hardware.memory)
        found = None
        for size in sizes:
            passes = -(-tokens // size)
            parts = [*self._state(pool, sleep), *shared, *self._in_hand(pool), *self._passes(pool, size, passes)]
            share = Share(" + ".join(pool.units), pool.size, Memory(size, parts), passes, room)
            if share.fits:
                return share
            found = share if found is None or share.memory.peak < found.memory.peak else found
        assert found is not None
        return found

    # ---- models

    def _state(self, pool: Pool, sleep: bool) -> list[Part]:
        parts: list[Part] = []
        for model in self.held_by(pool):
            parts += self._learner(model, pool, sleep) if model.trained else self._scorer(model, pool)
        return parts

    def _learner(self, model: PlannedModel, pool: Pool, sleep: bool) -> list[Part]:
        options, stage, devices = self.options, self.options.zero_stage, pool.size
        split = devices if stage > 0 else 1
        phases = ("scoring", "update") if sleep else PHASES
        parts = []
        if not options.adam_offload:
            average = 4 * model.learnt if options.enable_ema and model.role == "actor" else 0
            parts.append(Part(f"{model.name}: masters and moments", (12 * model.learnt + average) // split, phases))
        if model.frozen_weights:
            parts.append(Part(f"{model.name}: frozen weights", model.frozen_weights // split, phases))
        if devices == 1 or stage == 0:
            working = model.weights - model.frozen_weights if options.bf16 else 0
            parts.append(Part(f"{model.name}: working weights", working, phases))
        elif stage < 3:
            parts.append(Part(f"{model.name}: working weights, whole", model.weights, ("scoring", "update")))
        return parts

    def _scorer(self, model: PlannedModel, pool: Pool) -> list[Part]:
        split = pool.size > 1 and (self.options.zero_stage == 3 or model.offload)
        if not split:
            phases = ("scoring",) if model.offload else PHASES
            return [Part(f"{model.name}: weights", model.weights, phases)]
        return [] if model.offload else [Part(f"{model.name}: weights", model.weights // pool.size)]

    def _in_hand(self, pool: Pool) -> list[Part]:
        """Layers that are gathered while they work, of models that are split; models take turns."""
        found = {"scoring": [0], "update": [0]}
        for model in self.held_by(pool) if pool.size > 1 else []:
            size = model.root_weights + LAYERS_IN_HAND * model.layer_weights
            if self.options.zero_stage == 3 or model.offload:
                found["scoring"].append(size)
            if self.options.zero_stage == 3 and model.trained:
                found["update"].append(size)
        return [Part("layers in hand", max(sizes), (phase,)) for phase, sizes in found.items()]

    def _passes(self, pool: Pool, tokens: int, passes: int) -> list[Part]:
        models = self.held_by(pool)
        parts = []
        if scored := [model.scoring_bytes(min(tokens, model.pass_tokens or tokens)) for model in models]:
            parts.append(Part("a pass of scoring", max(scored), ("scoring",)))
        # Actor and critic take turns: the one that needs more decides.
        updates = [self._update(model, pool, tokens, passes) for model in models if model.trained]
        return parts + max(updates, key=total, default=[])

    def _update(self, model: PlannedModel, pool: Pool, tokens: int, passes: int) -> list[Part]:
        width = GRADIENT_DTYPES[self.options.grad_accum_dtype].itemsize
        whole = self.options.zero_stage == 0 or pool.size == 1 or (passes > 1 and keeps_whole_sums(model.learnt))
        sums = Part(f"{model.name}: gradient sums, whole", width * model.learnt, ("update",))
        if not whole:
            layer = model.layer_weights * width // (2 if self.options.bf16 else 4)
            sums = Part(f"{model.name}: gradient sums", width * model.learnt // pool.size + layer, ("update",))
        taken = model.training_bytes(tokens)
        return [
            sums,
            Part(f"{model.name}: activations of {tokens:,} tokens", taken.kept, ("update",)),
            Part(f"{model.name}: what the backward pass adds", taken.peak - taken.kept, ("update",)),
        ]

    # ---- engines

    def of_builtin(self, layout: Layout) -> EngineShare:
        """The built-in engine on a device of the policy: all weights gathered, keys and values by its own rule."""
        pool, rows = layout.pool_of("actor"), self.work.rows
        held = Memory(0, self._state(pool, sleep=False)).during("rollout")
        free = max(0, self.machines.hardware.memory - held - self.actor.weights)
        samples = min(self.options.rollout_slots, self._samples_of(pool.size))
        size = self.actor.engine_memory().keys_and_values(samples, rows.longest, free) if free else 0
        slots = min(samples, size // (rows.longest * self.kv_token_bytes))
        return EngineShare(self.actor.weights, size, slots, size / self.machines.hardware.memory)

    def _engine(self, engine: EngineShare, phases: tuple[str, ...]) -> list[Part]:
        vocabulary = self.actor.whole.model.config.get_text_config().vocab_size
        return [
            Part("engine: weights", engine.weights, phases),
            Part("engine: keys and values", engine.keys_and_values, phases),
            Part("engine: drawing tokens", SAMPLED_COPIES * engine.slots * vocabulary * 4, ("rollout",)),
        ]

    def _samples_of(self, engines: int) -> int:
        ahead = self.options.async_queue_size if self.options.outlives_updates else 0
        samples = (1 + ahead) * self.options.rollout_batch_size * self.options.n_samples_per_prompt
        return -(-samples // engines)

    def of_engine(self, engines: Engines, utilization: float) -> EngineShare:
        """An engine that may take this share of its devices' memory."""
        device = int(utilization * self.machines.hardware.memory)
        weights = self.actor.weights // engines.tensor_parallel
        rows = self.work.rows
        tokens = max(0, device - weights) * engines.tensor_parallel // self.kv_token_bytes
        alone = rows.longest  # tokens of a sample that shares nothing
        if self.options.enable_prefix_caching and rows.group > 1:
            alone = rows.answer + -(-rows.prompt // rows.group)
        slots = min(tokens // alone, self.options.rollout_slots, self._samples_of(engines.number))
        return EngineShare(weights, max(0, device - weights), slots, utilization)

    def of_hybrid(self, layout: Layout, *, sleep: bool) -> EngineShare:
        """An engine that takes what its neighbours leave it, unless the options say how much."""
        assert layout.engines is not None
        if "vllm_gpu_memory_utilization" in self.options.given:
            return self.of_engine(layout.engines, self.options.vllm_gpu_memory_utilization)
        hardware = self.machines.hardware
        alone = replace(layout, engines=replace(layout.engines, pool=None))
        beside = self.of_pool(alone, layout.pools[0], None, sleep=sleep).memory
        taken = beside.during("rollout") if sleep else beside.peak
        share = max(0.0, FILL - taken / hardware.memory)
        return self.of_engine(layout.engines, int(20 * share) / 20)
