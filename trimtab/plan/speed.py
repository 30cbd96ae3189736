"""Time of an optimizer step, or of an iteration in RL: one cost model for a device, a sharded job and a cluster.

By phase:

    rollout   prefill of the prompts; then each decode step reads the weights and the KV cache of all running sequences,
              layer after layer; with several devices it sums their results
    sync      gathering the policy's weights and sending them to the engines
    scoring   a forward pass of every model that scores
    update    the arithmetic of 3 forward passes (2 if only adapters are trained), and one more for checkpointed layers;
              a pass takes at least the host's time for its layers, and adds its gradients to the step's sums
    moving    offloading the optimizer and a sleeping engine to main memory and back

By cause, in one process and for one model (`Cost`):

    arithmetic  matrix products at a share of the peak, activations written and read at a share of the bandwidth
    unhidden    gathering weights and summing gradients, minus the arithmetic that overlaps with it
    tensor      a sum over the tensor-parallel group after attention and feed-forward of every layer, in every pass
    context     gathering the row's keys and values in every layer, again in the backward pass, and summing gradients
    optimizer   reading and writing its state, in main memory if it is offloaded
    moving      offloading activations to main memory and back

A token's forward pass takes 2 operations per multiplied weight, and 2 x length x width per layer for attention. A
token's activations are counted in a fake pass of the trained model; for other models they scale with layers x width.
The loop calls one role after the other, so seconds add up even if roles have their own devices. Rates of one device
were fitted to passes of four Llama shapes on one H200 (docs/plan.md), those of several to published figures
(docs/performance.md). The estimate is for choosing between settings, and is good to a factor of two.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from trimtab.config.rl_jobs import RLOptions
from trimtab.config.training_options import ModelOptions
from trimtab.distributed.fsdp import GRADIENT_DTYPES, keeps_unsharded_sums
from trimtab.distributed.ray.placement import Layout
from trimtab.models.load import TrainedModelOptions
from trimtab.plan.fake_model import PlannedModel
from trimtab.plan.hardware import MAIN_MEMORY, ClusterHardware, Hardware
from trimtab.plan.layouts import Split
from trimtab.plan.memory import EngineShare, Memory, ProcessMemory
from trimtab.plan.workload import Work

BANDWIDTH_SHARE = 0.7
LAYER_SECONDS = 25e-6  # overhead of a layer in a decode step on an accelerator, besides memory traffic
REDUCE_SECONDS = 20e-6  # least time of an all-reduce over the devices of an engine
COUNTED_TOKENS = 4096  # of the fake pass
SUM_BYTES = 14  # per trained weight and micro-batch: its gradient is written, read and added to the step's sum
OPTIMIZER_BYTES = 46  # per trained weight: norm and scaling of gradients; update and cast of master and moments
ENOUGH = 1.03  # a micro-batch is large enough if its time per token is at most this multiple of the largest one's,
AHEAD = 1.5  # and if the device works this many times as long as the host
FILLING = 8192  # tokens below which matrix products leave a part of the device idle
SUMS_OF_A_LAYER = 2  # all-reduces over a tensor-parallel group, per pass
PHASES = ("rollout", "sync", "scoring", "update", "moving")
CAUSES = ("arithmetic", "unhidden", "tensor", "context", "optimizer", "moving")


@dataclass(frozen=True)
class Rates:
    """Efficiency of passes."""

    arithmetic: float
    """Share of peak FLOP/s in training."""
    scoring: float
    """Share of peak FLOP/s in scoring."""
    forward: float
    """Number of times that activations are read or written in a forward pass."""
    backward: float
    """The same for activations and their gradients in a backward pass."""
    host: float
    """Seconds of the host per layer of a training pass."""


# One accelerator, with eager and with compiled layers.
PLAIN = Rates(arithmetic=0.75, scoring=0.75, forward=5.7, backward=12, host=3e-3)
COMPILED = Rates(arithmetic=0.75, scoring=0.75, forward=2.1, backward=6, host=3e-3)
# A CPU; and several processes, which wait for each other. These were not measured.
CPU = Rates(arithmetic=0.4, scoring=0.5, forward=2, backward=4, host=0)
SEVERAL = Rates(arithmetic=0.45, scoring=0.55, forward=2, backward=4, host=0)


def rates_of(options: ModelOptions, hardware: Hardware, processes: int = 1) -> Rates:
    """The rates of a run that is long enough to compile its layers."""
    if not hardware.accelerator:
        return CPU
    if processes > 1:
        return SEVERAL
    return COMPILED if options.compile != "off" and options.not_compiled is None else PLAIN


@dataclass(frozen=True)
class Cost:
    """Seconds in one process for one model in one phase, by cause."""

    arithmetic: float = 0.0
    sending: float = 0.0
    """Without overlap with arithmetic."""
    tensor: float = 0.0
    context: float = 0.0
    optimizer: float = 0.0
    moving: float = 0.0

    @property
    def unhidden(self) -> float:
        return max(0.0, self.sending - self.arithmetic)

    @property
    def whole(self) -> float:
        return sum(getattr(self, cause) for cause in CAUSES)


@dataclass
class StepTime:
    """Seconds of an optimizer step, or of an iteration in RL."""

    tokens: int
    phases: dict[str, float] = field(default_factory=dict)
    costs: list[Cost] = field(default_factory=list)
    link: str = ""
    """The link over which weights are synced."""

    def add(self, phase: str, cost: Cost) -> None:
        self.costs.append(cost)
        self.phases[phase] = self.phases.get(phase, 0.0) + cost.whole

    def due_to(self, cause: str) -> float:
        return sum(getattr(cost, cause) for cost in self.costs)

    @property
    def whole(self) -> float:
        return sum(self.phases.values())


class TimeModel:
    """Times of a job on given machines. All but the rollout are those of one process of the pool."""

    def __init__(
        self, options: TrainedModelOptions, machines: ClusterHardware, work: Work, models: Sequence[PlannedModel]
    ):
        """`models`: of one process. ValueError: the speed of the device is unknown."""
        self.options, self.machines, self.work, self.models = options, machines, work, models
        hardware = machines.hardware
        flops, bandwidth = hardware.flops(options.bf16), hardware.bandwidth
        if flops is None or bandwidth is None:
            raise ValueError(f"{hardware.name}: how fast it is is not known")
        self.flops, self.bandwidth, self.accelerator = flops, bandwidth * BANDWIDTH_SHARE, hardware.accelerator
        self.rates = rates_of(options, hardware, machines.devices)
        counted = min(COUNTED_TOKENS, work.tokens)
        # Bytes saved for the backward pass without gradient checkpointing, per token and unit of layers x width.
        self.activation_bytes = models[0].training_bytes(counted, 0).kept / counted / models[0].size

    # ---- a token

    def operations(self, model: PlannedModel) -> float:
        """Operations of a token's forward pass in one process."""
        return 2 * model.multiplied + 2 * self.work.rows.longest * model.size / model.tensor

    def _traffic(self, model: PlannedModel, times: float) -> float:
        """Seconds to read or write a token's activations `times` times."""
        return times * self.activation_bytes * model.size / self.bandwidth

    def forward(self, model: PlannedModel) -> float:
        return self.operations(model) / (self.flops * self.rates.scoring) + self._traffic(model, self.rates.forward)

    def training(self, model: PlannedModel, recomputed: int | None = None) -> float:
        """Seconds of a token's forward and backward pass. `recomputed`: layers with gradient checkpointing, by default
        from the options."""
        number = model.whole.recomputing_layers if recomputed is None else recomputed
        again = min(1.0, number / model.layers) if model.layers else 0.0
        times = (2 if self.options.lora_rank else 3) + again
        arithmetic = times * self.operations(model) / (self.flops * self.rates.arithmetic)
        return arithmetic + self._traffic(model, (1 + again) * self.rates.forward + self.rates.backward)

    # ---- passes

    def one_pass(self, model: PlannedModel, tokens: float, recomputed: int | None = None) -> float:
        """Seconds of one training micro-batch; `tokens`: of one process."""
        seconds = max(tokens * self.training(model, recomputed), self.rates.host * model.config.num_hidden_layers)
        return seconds + SUM_BYTES * model.learnt / self.bandwidth

    def enough(self, model: PlannedModel) -> int:
        """Micro-batch size above which there is no gain."""
        host = self.rates.host * model.config.num_hidden_layers
        sums = SUM_BYTES * model.learnt / self.bandwidth
        return max(FILLING, int(max(AHEAD * host, sums / (ENOUGH - 1)) / self.training(model, 0)))

    def update(self, model: PlannedModel, split: Split, tokens: float, steps: int, memory: Memory) -> Cost:
        """Cost of training on `tokens` of the whole job in `steps` optimizer steps, with the micro-batches of
        `memory`."""
        options, machines, context = self.options, self.machines, split.context
        each = tokens / steps / split.data
        row = memory.tokens if each <= memory.tokens else self.work.rows.packed(memory.tokens)
        whole, part = divmod(each, row)
        arithmetic = whole * self.one_pass(model, row / context, memory.recomputed)
        if part:
            arithmetic += self.one_pass(model, part / context, memory.recomputed)
        passes = math.ceil(whole) + bool(part)
        state = OPTIMIZER_BYTES * model.learnt / split.parts
        optimizer = state / self.bandwidth
        if options.adam_offload and self.accelerator:
            width = GRADIENT_DTYPES[options.grad_accum_dtype].itemsize
            optimizer = state / MAIN_MEMORY + machines.moving((width + 4) * model.learnt / split.parts)
        again = int(options.gradient_checkpointing)
        own = tokens / split.data / context
        moving = 0.0
        if options.offload_activations and self.accelerator:
            inputs = model.size * (2 if options.bf16 else 4)  # bytes of a token's layer inputs
            moving = 2 * machines.moving(own * inputs)
        return Cost(
            steps * arithmetic,
            steps * self._sent(model, split, passes),
            optimizer=steps * optimizer,
            moving=moving,
            **self._in_layers(model, split, own, 2 + again, 3 + again),
        )

    def scoring(self, model: PlannedModel, held: ProcessMemory, tokens: float, memory: Memory) -> Cost:
        """Cost of scoring `tokens` of the whole job with a model of the pool described by `held`."""
        split, machines = held.split, self.machines
        own = tokens / split.data / split.context
        passes = math.ceil(tokens / split.data / min(memory.tokens, model.pass_tokens or memory.tokens))
        sending = 0.0
        if split.zero_stage == 3 or held.is_split(model):
            sending = passes * machines.gathering(model.weights, held.parts_of(model), split.tensor)
        if model.offload and self.accelerator:
            times = passes if held.is_split(model) else 1
            sending += times * machines.moving(model.weights / held.parts_of(model))
        return Cost(own * self.forward(model), sending, **self._in_layers(model, split, own, 1, 1))

    def _sent(self, model: PlannedModel, split: Split, passes: int) -> float:
        """Seconds of a step for gathering weights and summing gradients."""
        machines = self.machines
        gathering = machines.gathering(model.weights, split.parts, split.tensor)
        gathered = passes * gathering
        if split.zero_stage == 3:
            near = machines.gathering(model.weights, split.neighbours) if split.neighbours > 1 else gathering
            gathered += passes * near
        gradients = GRADIENT_DTYPES[self.options.grad_accum_dtype].itemsize * model.learnt
        summed = 1 if keeps_unsharded_sums(model.learnt * split.tensor) else passes
        sums = machines.gathering(gradients, split.parts, split.tensor)
        copies = machines.gathering(2 * gradients / split.parts, split.replicate, split.tensor * split.parts)
        return gathered + summed * (sums + copies)

    def _in_layers(self, model: PlannedModel, split: Split, own: float, sums: int, gathers: int) -> dict[str, float]:
        """Seconds of communication inside layers. `own`: tokens of this process; `sums`, `gathers`: number per
        token."""
        states = SUMS_OF_A_LAYER * sums * own * model.size * (2 if self.options.bf16 else 4)
        keys = own * split.context * 2 * model.key_heads * model.token_keys
        return {
            "tensor": self.machines.gathering(2 * states, split.tensor),  # all-reduce: reduce-scatter and all-gather
            "context": self.machines.gathering(gathers * model.layers * keys, split.context, split.tensor),
        }

    # ---- a step, an iteration

    def step(
        self,
        pools: Sequence[tuple[ProcessMemory, Memory]],
        engine: EngineShare | None = None,
        layout: Layout | None = None,
        *,
        sleep: bool = False,
    ) -> StepTime:
        """Time of an optimizer step, or of an iteration in RL. `layout`: of a cluster, with engines to sync."""
        options, rows, steps, epochs, apart = self.options, self.work.rows, 1, 1, False
        time = StepTime(self.work.tokens)
        if isinstance(options, RLOptions):
            assert engine is not None
            samples, epochs = options.rollout_batch_size * options.n_samples_per_prompt, options.max_epochs
            time = StepTime(options.rollout_batch_size * rows.prompt + samples * rows.answer)
            steps = epochs * max(1, samples // options.train_batch_size)
            apart = options.uses_vllm if layout is None else layout.engines is not None
            time.phases["rollout"] = self.rollout(samples, pools[0][0].split, engine, layout)
        if layout is not None:
            time.phases["sync"], time.link = self.sync(layout)
        for held, memory in pools:
            for model in held.models:
                for _ in range(self.times_scored(model, apart=apart)):
                    time.add("scoring", self.scoring(model, held, time.tokens, memory))
        for held, memory in pools:
            for model in held.learners:
                time.add("update", self.update(model, held.split, epochs * time.tokens, steps, memory))
        if layout is not None and engine is not None:
            time.phases["moving"] = self._sleep_seconds(pools[0][0], engine) if sleep else 0.0
        return time

    def times_scored(self, model: PlannedModel, *, apart: bool) -> int:
        """Number of scoring passes of a model in an iteration. `apart`: engines have a copy of the weights."""
        options = self.options
        if not isinstance(options, RLOptions):
            return int(not model.trained)
        if model.role != "actor":
            return 1
        as_reference = int(options.init_kl_coef > 0 and options.lora_rank > 0)  # the policy without adapters
        as_reference += int(options.is_taught and (not options.teacher_model or options.teacher_is_base))
        if not apart and not options.bf16 and not options.weight_only_int8:
            return as_reference  # the engine's log-probs are used
        there = {"reference": options.init_kl_coef > 0, "teacher": options.is_taught and not options.teaches_vocabulary}
        leaves_kl = options.leaves_kl_to_update(accelerator=self.accelerator)
        return as_reference + options.scores_old_policy(**there, leaves_kl=leaves_kl)

    def rollout(self, samples: int, split: Split, engine: EngineShare, layout: Layout | None) -> float:
        options, rows, actor = self.options, self.work.rows, self.models[0]
        assert isinstance(options, RLOptions)
        if not engine.fits:
            return math.inf
        engines = layout.engines if layout is not None else None
        number, devices = (engines.number, engines.tensor_parallel) if engines else (split.data * split.context, 1)
        samples = -(-samples // number)
        slots = min(engine.slots, samples)
        prompts = samples / rows.group if engines is None or options.enable_prefix_caching else samples
        traffic = actor.weights + slots * (rows.prompt + rows.answer / 2) * actor.kv_token_bytes
        step = max(
            traffic / devices / self.bandwidth,
            slots / devices * self.operations(actor) / (self.flops * self.rates.scoring),
        )
        layers = actor.config.num_hidden_layers
        if self.accelerator:
            step += LAYER_SECONDS * layers
        if devices > 1:
            result = slots * actor.config.hidden_size * 2  # bytes of a layer's bf16 result, reduced twice per layer
            once = REDUCE_SECONDS + 2 * result * (devices - 1) / devices / self.machines.within()
            step += 2 * layers * once
        waves = max(1.0, samples / slots)
        return prompts * rows.prompt * self.forward(actor) / devices + waves * rows.answer * step

    def sync(self, layout: Layout) -> tuple[float, str]:
        """Seconds of a weight sync, and the link it uses."""
        machines, engines, weights = self.machines, layout.engines, self.models[0].weights
        gathered = machines.gathering(weights, layout.pool_of("actor").size) if self.options.zero_stage > 0 else 0.0
        if engines is None:
            return gathered, "gathering alone"
        if engines.pool is not None:
            return gathered + weights / engines.tensor_parallel / self.bandwidth, "the same device"
        if layout.devices <= machines.gpus:
            return gathered + weights / machines.within(), f"{machines.within() / 1e9:.3g} GB/s within a machine"
        return gathered + weights / machines.between(), f"{machines.between() / 1e9:.3g} GB/s from one device"

    def _sleep_seconds(self, held: ProcessMemory, engine: EngineShare) -> float:
        """Seconds to offload the optimizer and load it back, and to load the engine's weights back."""
        state = sum(12 * model.learnt // held.parts_of(model) for model in held.learners)
        optimizer = 0 if self.options.adam_offload else state
        return 2 * self.machines.moving(optimizer) + self.machines.moving(engine.weights)
