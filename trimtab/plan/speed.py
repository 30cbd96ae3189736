"""Time of a step by phase: arithmetic at a share of the device's peak, and bytes at a share of its bandwidth.

    update    3 forward passes' arithmetic (2 where only adapters are trained) a token and one more of the layers that
              recompute, the activations written and read; a pass takes no less than the host needs for its layers, and
              adds its gradients to the step's; then the optimiser reads and writes its state
    scoring   a forward pass a token and model that is asked, its activations written and read
    rollout   a forward pass a prompt token; then, for each token of an answer, the weights and the keys and values of
              all answers that are written at once are read from memory, and every layer waits for the one before it

A token's forward pass is 2 operations a multiplied weight, and 2 x length x width a layer for attention. A token's
activations are counted in a pretended pass of the trained model, and are as layers x width for other models. Shares and
times were fitted to passes of four Llama shapes on one H200 (docs/plan.md). It is an estimate for choosing between
settings, good to a factor of two.
"""

from dataclasses import dataclass
from typing import Any

from trimtab.config.groups import ModelOptions
from trimtab.config.jobs import RLOptions
from trimtab.models.load import TrainedModelOptions
from trimtab.plan.fake_model import Pretended
from trimtab.plan.hardware import Hardware
from trimtab.plan.memory import Memory, MemoryModel
from trimtab.plan.workload import Work

BANDWIDTH_SHARE = 0.7
LAYER_SECONDS = 25e-6  # that a layer of one decode step takes on an accelerator besides its bytes
COUNTED_TOKENS = 4096  # of the pretended pass
SUM_BYTES = 14  # a trained weight and pass: its gradient written, read and added to the step's
OPTIMISER_BYTES = 46  # a trained weight: gradients measured and scaled; they, master and moments read, written, cast
ENOUGH = 1.03  # a pass whose tokens take at most this many times what they take in the largest pass is large enough
AHEAD = 1.5  # and in which the device works this many times as long as the host
FILLING = 8192  # tokens, with fewer of which matrix products leave a part of the device idle


@dataclass(frozen=True)
class Rates:
    """How fast passes are."""

    arithmetic: float
    """Share of the peak that matrix products reach in training, and"""
    scoring: float
    """in scoring."""
    forward: float
    """Times that activations go through memory in a forward pass, and"""
    backward: float
    """with their gradients in a backward pass."""
    host: float
    """Seconds that the host takes for a layer of a training pass."""


# Of one accelerator, where layers are plain and where they are compiled.
PLAIN = Rates(arithmetic=0.75, scoring=0.75, forward=5.7, backward=12, host=3e-3)
COMPILED = Rates(arithmetic=0.75, scoring=0.75, forward=2.1, backward=6, host=3e-3)
# Of a CPU; and of several processes, which wait for each other: nothing of them was measured here.
CPU = SPLIT = Rates(arithmetic=0.4, scoring=0.5, forward=2, backward=4, host=0)


def rates_of(options: ModelOptions, hardware: Hardware) -> Rates:
    """Of a run that is long enough to have its layers compiled."""
    if not hardware.accelerator:
        return CPU
    return COMPILED if options.compile != "off" and options.not_compiled is None else PLAIN


@dataclass(frozen=True)
class StepTime:
    """Seconds of an optimiser step; of an iteration in RL."""

    seconds: dict[str, float]
    tokens: int

    @property
    def whole(self) -> float:
        return sum(self.seconds.values())


def assumptions(hardware: Hardware, bf16: bool, rates: Rates) -> str:
    flops, bandwidth = hardware.flops(bf16), hardware.bandwidth
    assert flops is not None and bandwidth is not None
    how = " (layers are compiled)" if rates is COMPILED else ""
    return (
        f"{flops / 1e12:,.3g} TFLOP/s in {'bf16' if bf16 else 'fp32'}, {rates.arithmetic:.0%} of it used in training "
        f"and {rates.scoring:.0%} in scoring; {bandwidth / 1e12:,.3g} TB/s of memory traffic, {BANDWIDTH_SHARE:.0%} of "
        f"it used, activations {rates.forward:g} times written or read in a forward pass and "
        f"{rates.forward + rates.backward:g} times in an update{how}; every sample as long as it may be"
    )


def clock_of(model: MemoryModel) -> "Clock | None":
    """None: nothing is known of how fast the device is."""
    options, hardware, work = model.options, model.hardware, model.work
    flops, bandwidth = hardware.flops(options.bf16), hardware.bandwidth
    if flops is None or bandwidth is None:
        return None
    trained = next(iter(model.trained.values()))
    counted = min(COUNTED_TOKENS, work.tokens)
    kept = trained.plain_pass(work.rows, counted).kept / counted / size(trained)
    rates = rates_of(options, hardware)
    return Clock(rates, flops, bandwidth, options, work, kept, accelerator=hardware.accelerator)


def step_time(model: MemoryModel, clock: "Clock", memory: Memory) -> StepTime:
    options, work = model.options, model.work
    if not isinstance(options, RLOptions):
        seconds = {"update": sum(clock.update(trained, work.tokens, 1, memory) for trained in model.trained.values())}
        if model.frozen:
            seconds = {"scoring": sum(clock.forward(m) * work.tokens for m in model.frozen.values())} | seconds
        return StepTime(seconds, work.tokens)
    samples = options.rollout_batch_size * options.n_samples_per_prompt
    tokens = options.rollout_batch_size * work.rows.prompt + samples * work.rows.answer
    steps = options.max_epochs * max(1, samples // options.train_batch_size)
    seconds = {
        "rollout": clock.rollout(model.trained["actor"], samples, model.kv_token_bytes),
        "scoring": sum(clock.forward(m) * tokens for m in scorers(model)),
        "update": sum(clock.update(m, tokens * options.max_epochs, steps, memory) for m in model.trained.values()),
    }
    return StepTime(seconds, tokens)


def scorers(model: MemoryModel) -> list[Pretended]:
    """The models that are asked about the answers, once for each time."""
    options, trained = model.options, model.trained
    assert isinstance(options, RLOptions)
    found = [*model.frozen.values(), *(scorer for name, scorer in trained.items() if name != "actor")]
    if options.init_kl_coef > 0 and options.lora_rank > 0:
        found.append(trained["actor"])  # without its adapters
    if scores_policy(options, apart=options.uses_vllm, accelerator=model.hardware.accelerator):
        found.append(trained["actor"])
    return found


def scores_policy(options: RLOptions, *, apart: bool, accelerator: bool) -> bool:
    """Whether the loop asks the policy for log-probs, or takes those of the engine or of the update. `apart`: engines
    have a copy of the weights."""
    if not apart and not options.bf16 and not options.weight_only_int8:
        return False
    there = {"reference": options.init_kl_coef > 0, "teacher": options.teacher_model is not None}
    return options.scores_old_policy(**there, leaves_kl=options.leaves_kl_to_update(accelerator=accelerator))


class Clock:
    """Of one device."""

    def __init__(
        self,
        rates: Rates,
        flops: float,
        bandwidth: float,
        options: TrainedModelOptions,
        work: Work,
        activation_bytes: float,
        *,
        accelerator: bool = True,
    ):
        """`activation_bytes`: kept for the backward pass, of a token and a unit of `size`."""
        self.rates, self.options, self.work, self.accelerator = rates, options, work, accelerator
        self.flops, self.bandwidth = flops, bandwidth * BANDWIDTH_SHARE
        self.activation_bytes = activation_bytes

    def operations(self, model: Pretended) -> float:
        """Of a token's forward pass."""
        return 2 * multiplied(model) + 2 * self.work.rows.longest * size(model)

    def traffic(self, model: Pretended, times: float) -> float:
        """Seconds in which a token's activations go so many times through memory."""
        return times * self.activation_bytes * size(model) / self.bandwidth

    def forward(self, model: Pretended) -> float:
        return self.operations(model) / (self.flops * self.rates.scoring) + self.traffic(model, self.rates.forward)

    def training(self, model: Pretended, recomputed: int | None = None) -> float:
        """A token, forwards and backwards. `recomputed`: layers, if it is not the options that say it."""
        again = self._recomputed_share(model, recomputed)
        passes = (2 if self.options.lora_rank else 3) + again
        arithmetic = passes * self.operations(model) / (self.flops * self.rates.arithmetic)
        return arithmetic + self.traffic(model, (1 + again) * self.rates.forward + self.rates.backward)

    def _recomputed_share(self, model: Pretended, recomputed: int | None) -> float:
        """Of the layers."""
        options, layers = self.options, config_of(model).num_hidden_layers
        if recomputed is not None:
            return min(recomputed / layers, 1.0)
        number = options.gradient_checkpointing_layers
        return number / layers if isinstance(number, int) else float(options.gradient_checkpointing)

    def one_pass(self, model: Pretended, tokens: int, recomputed: int | None = None) -> float:
        """Of training."""
        seconds = tokens * self.training(model, recomputed)
        seconds = max(seconds, self.rates.host * config_of(model).num_hidden_layers)
        return seconds + SUM_BYTES * model.trained() / self.bandwidth

    def update(self, model: Pretended, tokens: int, steps: int, memory: Memory) -> float:
        """In passes of a size, and with as many layers recomputing, as `memory` is of."""
        whole, part = divmod(tokens / steps, memory.tokens)
        passes = whole * self.one_pass(model, memory.tokens, memory.recomputed)
        if part:
            passes += self.one_pass(model, int(part), memory.recomputed)
        return steps * (passes + OPTIMISER_BYTES * model.trained() / self.bandwidth)

    def enough(self, model: Pretended) -> int:
        """Tokens of a pass beyond which nothing is gained."""
        host = self.rates.host * config_of(model).num_hidden_layers
        sums = SUM_BYTES * model.trained() / self.bandwidth
        return max(FILLING, int(max(AHEAD * host, sums / (ENOUGH - 1)) / self.training(model, 0)))

    def rollout(self, model: Pretended, samples: int, kv_token_bytes: int) -> float:
        options, rows = self.options, self.work.rows
        assert isinstance(options, RLOptions)
        slots = min(options.rollout_slots, samples)
        read = options.rollout_batch_size * rows.prompt * self.forward(model)
        traffic = model.weights() + slots * (rows.prompt + rows.answer / 2) * kv_token_bytes
        step = self.decode_step(model, slots, traffic)
        return read + -(-samples // slots) * rows.answer * step

    def decode_step(self, model: Pretended, slots: float, traffic: float) -> float:
        """A token of every answer under way; `traffic`: bytes that are read for it."""
        step = max(traffic / self.bandwidth, slots * self.operations(model) / (self.flops * self.rates.scoring))
        return step + LAYER_SECONDS * config_of(model).num_hidden_layers if self.accelerator else step


def config_of(model: Pretended) -> Any:
    return model.model.config.get_text_config()


def size(model: Pretended) -> int:
    """Layers x width."""
    return config_of(model).hidden_size * config_of(model).num_hidden_layers


def multiplied(model: Pretended) -> float:
    """Weights that take part in a token's matrix products: all but an embedding that is no head as well, and of experts
    those that a token goes to."""
    inner, config = model.model.inner, config_of(model)
    embedding, head = inner.get_input_embeddings().weight, inner.get_output_embeddings()
    tied = head is not None and head.weight is embedding
    whole = sum(p.numel() for p in inner.parameters()) - (0 if tied else embedding.numel())
    experts = [p for name, p in inner.named_parameters() if ".experts." in name and p.ndim == 3]
    unused = sum(p.numel() * (1 - config.num_experts_per_tok / p.shape[0]) for p in experts)
    return whole - unused
