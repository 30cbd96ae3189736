"""Time of a step by phase: arithmetic at a share of the device's peak, and bytes at a share of its bandwidth.

    update    3 forward passes' arithmetic (4 with checkpointing; 2 and 3 where only adapters are trained) a token, the
              activations written and read; then the optimiser reads and writes its state
    scoring   a forward pass a token and model, its activations written and read
    rollout   a forward pass a prompt token; then, for each token of an answer, the weights and the keys and values of
              all answers that are written at once are read from memory

A token's forward pass is 2 operations a multiplied weight, and 2 x length x width a layer for attention. A token's
activations are counted in a pretended pass of the trained model, and are as layers x width for other models. It is an
estimate for choosing between settings, good to a factor of two; small passes wait for the host more than this says.
"""

from dataclasses import dataclass
from typing import Any

from trimtab.config.jobs import RLOptions
from trimtab.models.load import TrainedModelOptions
from trimtab.train.plan.hardware import Hardware
from trimtab.train.plan.memory import MemoryModel
from trimtab.train.plan.pretended import Pretended
from trimtab.train.plan.work import Work

TRAINING_SHARE = 0.4  # of the peak arithmetic
SCORING_SHARE = 0.5
BANDWIDTH_SHARE = 0.7
LAYER_SECONDS = 50e-6  # the least time of a layer in one decode step on an accelerator
READS_FORWARD, READS_BACKWARD = 2, 4  # times that activations go through memory: with their gradients backwards
COUNTED_TOKENS = 4096  # of the pretended pass
OPTIMISER_BYTES = 34  # a trained weight: gradient, master and two moments read, all but the first written, cast


@dataclass(frozen=True)
class StepTime:
    """Seconds of an optimiser step; of an iteration in RL."""

    seconds: dict[str, float]
    tokens: int

    @property
    def whole(self) -> float:
        return sum(self.seconds.values())


def assumptions(hardware: Hardware, bf16: bool) -> str:
    flops, bandwidth = hardware.flops(bf16), hardware.bandwidth
    assert flops is not None and bandwidth is not None
    return (
        f"{flops / 1e12:,.3g} TFLOP/s in {'bf16' if bf16 else 'fp32'}, {TRAINING_SHARE:.0%} of it used "
        f"in training and {SCORING_SHARE:.0%} in scoring; {bandwidth / 1e12:,.3g} TB/s of memory traffic, "
        f"{BANDWIDTH_SHARE:.0%} of it used, activations {READS_FORWARD} times written or read in a forward pass and "
        f"{READS_FORWARD + READS_BACKWARD} times in an update; every sample as long as it may be"
    )


def step_time(model: MemoryModel) -> StepTime | None:
    """None: nothing is known of how fast the device is."""
    options, hardware, work = model.options, model.hardware, model.work
    flops, bandwidth = hardware.flops(options.bf16), hardware.bandwidth
    if flops is None or bandwidth is None:
        return None
    trained = next(iter(model.trained.values()))
    counted = min(COUNTED_TOKENS, work.tokens)
    kept = trained.training_pass(work.rows, counted).kept / counted / size(trained)
    clock = Clock(hardware, flops, bandwidth, options, work, kept)
    if not isinstance(options, RLOptions):
        seconds = {"update": sum(clock.update(trained, work.tokens, 1) for trained in model.trained.values())}
        if model.frozen:
            seconds = {"scoring": sum(clock.forward(m) * work.tokens for m in model.frozen.values())} | seconds
        return StepTime(seconds, work.tokens)
    samples = options.rollout_batch_size * options.n_samples_per_prompt
    tokens = options.rollout_batch_size * work.rows.prompt + samples * work.rows.answer
    updates = options.max_epochs * max(1, samples // options.train_batch_size)
    scored = [*model.frozen.values(), *model.trained.values()]
    seconds = {
        "rollout": clock.rollout(model.trained["actor"], samples, model.kv_token_bytes),
        "scoring": sum(clock.forward(m) * tokens for m in scored),
        "update": sum(clock.update(m, tokens * options.max_epochs, updates) for m in model.trained.values()),
    }
    return StepTime(seconds, tokens)


class Clock:
    """Of one device."""

    def __init__(
        self,
        hardware: Hardware,
        flops: float,
        bandwidth: float,
        options: TrainedModelOptions,
        work: Work,
        activation_bytes: float,
    ):
        """`activation_bytes`: kept for the backward pass, of a token and a unit of `size`."""
        self.options, self.work, self.accelerator = options, work, hardware.accelerator
        self.flops, self.bandwidth = flops, bandwidth * BANDWIDTH_SHARE
        self.activation_bytes = activation_bytes

    def operations(self, model: Pretended) -> float:
        """Of a token's forward pass."""
        return 2 * multiplied(model) + 2 * self.work.rows.longest * size(model)

    def traffic(self, model: Pretended, times: int) -> float:
        """Seconds in which a token's activations go so many times through memory."""
        return times * self.activation_bytes * size(model) / self.bandwidth

    def forward(self, model: Pretended) -> float:
        return self.operations(model) / (self.flops * SCORING_SHARE) + self.traffic(model, READS_FORWARD)

    def training(self, model: Pretended) -> float:
        """A token, forwards and backwards."""
        passes = (2 if self.options.lora_rank else 3) + self.options.gradient_checkpointing
        arithmetic = passes * self.operations(model) / (self.flops * TRAINING_SHARE)
        return arithmetic + self.traffic(model, READS_FORWARD + READS_BACKWARD)

    def update(self, model: Pretended, tokens: int, steps: int) -> float:
        return tokens * self.training(model) + steps * OPTIMISER_BYTES * model.trained() / self.bandwidth

    def rollout(self, model: Pretended, samples: int, kv_token_bytes: int) -> float:
        options, rows = self.options, self.work.rows
        assert isinstance(options, RLOptions)
        slots = min(options.rollout_slots, samples)
        read = options.rollout_batch_size * rows.prompt * self.forward(model)
        traffic = model.weights() + slots * (rows.prompt + rows.answer / 2) * kv_token_bytes
        step = max(traffic / self.bandwidth, slots * self.forward(model))
        if self.accelerator:
            step = max(step, LAYER_SECONDS * config_of(model).num_hidden_layers)
        return read + -(-samples // slots) * rows.answer * step


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
