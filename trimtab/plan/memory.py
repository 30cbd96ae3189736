"""Memory of one process of a pool, part by part, in each phase of a step. One device is a pool of one process.

    rollout    weights and optimizer state, KV cache, prefill
    scoring    the same without prefill, and a forward pass without gradients
    loss       the same, with gradient sums, activations, and what the head's backward pass takes
    update     the same with the layers' backward passes in place of the head's
    reduction  of a sharded model: the end of the backward pass, with all gradients and no activations

What a process holds of a model sharded over several:

    masters, moments, frozen weights   a shard, in every stage
    working weights   --zero_stage 3: embedding, head and two layers are gathered at a time; otherwise all are, from the
                      forward pass on (PyTorch's FSDP2 keeps a copy, in fp32 too)
    gradients         unsharded sums between micro-batches, if they are small (distributed/fsdp); otherwise sharded
                      after every layer's backward pass, with one layer's whole gradient at a time
    activations       of this process's tokens: 1 / --ring_attn_size of a row. With --ds_tensor_parallel_size those
                      inside a layer are split, and the residual stream is not
    keys and values   of the whole row, for --ring_head_stride heads at a time, and as many gradients

An engine takes no part in training. The built-in one gathers the policy's weights for generation and sizes its own KV
cache; vLLM has a copy of the weights and a share of the device.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from trimtab.config.rl_jobs import RLOptions
from trimtab.distributed.fsdp import GRADIENT_DTYPES, keeps_unsharded_sums
from trimtab.distributed.ray.placement import Engines
from trimtab.models.lm_head import chunk_tokens
from trimtab.models.load import TrainedModelOptions
from trimtab.models.policy import Policy
from trimtab.plan.fake_model import PassBytes, PlannedModel
from trimtab.plan.hardware import Hardware
from trimtab.plan.layouts import Split
from trimtab.plan.workload import Work, scoring_tokens

FILL = 0.85  # usable share of a device's memory; the rest is for uncounted memory and fragmentation
MOST_TOKENS = 2**17  # larger micro-batches are no faster
SAMPLED_COPIES = 3  # fp32 matrices [answers, vocabulary] while tokens are sampled, and
PENALISED_COPIES = 3  # this many more with a repetition penalty
LAYERS_IN_HAND = 2  # gathered at a time: the running one and the next
# Copies of a row's keys or values for the heads gathered at a time: received, reordered, and those of the next heads;
# in a backward pass also their gradients, and the gradients being sent back.
SCORED_KEYS, LEARNT_KEYS = 6, 10

PHASES = ("rollout", "scoring", "loss", "update", "reduction")
PASSES = ("loss", "update")
LEARNING = (*PASSES, "reduction")


def sampling_bytes(sequences: int, vocabulary: int, options: RLOptions) -> int:
    """What sampling a token of each of these sequences takes at most."""
    copies = SAMPLED_COPIES + (PENALISED_COPIES if options.repetition_penalty != 1 else 0)
    return copies * sequences * vocabulary * 4


@dataclass(frozen=True)
class Part:
    name: str
    size: int
    phases: tuple[str, ...] = PHASES


@dataclass
class Memory:
    """The memory of a process with micro-batches of `tokens` tokens, by part."""

    tokens: int
    parts: list[Part] = field(default_factory=list)
    recomputed: int | None = None
    """Number of layers with gradient checkpointing, if the plan chooses it."""

    def during(self, phase: str) -> int:
        return sum(part.size for part in self.parts if phase in part.phases)

    @property
    def peak(self) -> int:
        return max(self.during(phase) for phase in PHASES)

    @property
    def busiest(self) -> str:
        return max(PHASES, key=self.during)

    def fits(self, room: int) -> bool:
        return self.peak <= room


@dataclass(frozen=True)
class EngineShare:
    """An engine's memory on each of its devices, and the number of sequences it generates at once."""

    weights: int
    keys_and_values: int
    slots: int
    utilization: float
    """Share of a device's memory."""

    @property
    def fits(self) -> bool:
        return self.slots > 0


class ProcessMemory:
    """Memory of each process of a pool. Parts that do not depend on the micro-batch size are counted once."""

    def __init__(
        self,
        options: TrainedModelOptions,
        hardware: Hardware,
        work: Work,
        split: Split,
        models: Sequence[PlannedModel],
        *,
        sizes: dict[str, int] | None = None,
        engine: EngineShare | None = None,
        sleep: bool = False,
    ):
        """`hardware`: with the memory of one process. `models`: of the pool, split in `split.tensor` parts. `sizes`:
        number of processes of each role, if not all. `engine`: a vLLM engine on the same devices; `sleep`: engine and
        optimizer are offloaded in turn."""
        self.options, self.hardware, self.work, self.split, self.models = options, hardware, work, split, models
        self.engine, self.sleep = engine, sleep
        self._alone = split.processes == 1
        self._sizes = sizes or {}
        self.state = [Part("the program", hardware.program + hardware.growth)]
        for model in models:
            self.state += self._trained(model) if model.trained else self._frozen(model)
        self.rollout: list[Part] = []
        if engine is not None:
            self.rollout = self._vllm(engine)

    @property
    def room(self) -> int:
        return int(FILL * self.hardware.memory)

    @property
    def learners(self) -> list[PlannedModel]:
        return [model for model in self.models if model.trained]

    @property
    def layers(self) -> int:
        """Largest possible number of layers with gradient checkpointing: that of the smallest trained model."""
        return min((model.layers for model in self.learners), default=0)

    @property
    def step_tokens(self) -> int:
        """Tokens of a step in one process, or in one context-parallel group."""
        return max(self.work.least, -(-self.work.tokens // self.split.data))

    def passes(self, tokens: int) -> int:
        """Number of micro-batches in an optimizer step."""
        return 1 if tokens >= self.step_tokens else -(-self.step_tokens // self.work.rows.packed(tokens))

    def at(self, tokens: int, recomputed: int | None = None) -> Memory:
        """The memory with micro-batches of `tokens` (at most a step's); `recomputed`: layers with gradient
        checkpointing, by
        default from the options."""
        tokens = min(tokens, self.step_tokens)
        memory = Memory(tokens, [*self.state, *self.rollout], recomputed)
        scorers = self.models if isinstance(self.options, RLOptions) else [m for m in self.models if not m.trained]
        if scorers:
            name = "a pass of scoring" if self._alone else "a pass of scoring, and layers in hand"
            memory.parts.append(Part(name, max(self._scoring(model, tokens) for model in scorers), ("scoring",)))
        # Actor and critic are updated in turn, so the larger one decides.
        updates = [self._update(model, tokens, recomputed) for model in self.learners]
        memory.parts += max(updates, key=lambda parts: Memory(tokens, list(parts)).peak, default=[])
        return memory

    # ---- state

    def parts_of(self, model: PlannedModel) -> int:
        """Number of shards of a model: as many as the policy's, or as the processes it is in. A frozen model is sharded
        over all processes if the trained one is only replicated."""
        every = max(1, self._sizes.get(model.role, self.split.processes) // self.split.tensor)
        copies = not model.trained and self.split.parts == self.split.context
        return every if copies else min(self.split.parts, every)

    def is_split(self, model: PlannedModel) -> bool:
        """Whether a frozen model is sharded."""
        return not self._alone and self.options.splits_frozen(offload=model.offload)

    def _trained(self, model: PlannedModel) -> list[Part]:
        options, name, parts = self.options, model.name, self.parts_of(model)
        phases = ("scoring", *LEARNING) if self.sleep else PHASES
        share = "" if self._alone else f", 1 / {parts}"
        found = [Part(f"{name}: working weights", model.weights, phases)] if self._alone else []
        if not (options.adam_offload and self.hardware.accelerator):
            is_master = self._alone and not options.bf16  # fp32 working weights are the masters
            found.append(Part(f"{name}: fp32 masters{share}", 0 if is_master else 4 * model.learnt // parts, phases))
            matrices = sum(model.matrices)
            found.append(Part(f"{name}: Adam's moments{share}", 8 * (model.learnt - matrices) // parts, phases))
            if matrices:
                found.append(Part(f"{name}: Muon's momentum{share}", 4 * matrices // parts, phases))
            if isinstance(options, RLOptions) and options.enable_ema and model.role == "actor":
                found.append(Part(f"{name}: average (EMA){share}", 4 * model.learnt // parts, phases))
            if not self._alone:
                found.append(Part(f"{name}: frozen weights{share}", model.frozen_weights // parts, phases))
        return found

    def _frozen(self, model: PlannedModel) -> list[Part]:
        away = model.offload and self.hardware.accelerator
        if not self.is_split(model):
            return [Part(f"{model.name}: weights", model.weights, ("scoring",) if away else PHASES)]
        return [] if away else [Part(f"{model.name}: weights", model.weights // self.parts_of(model))]

    # ---- engines

    def gathered_to_answer(self) -> list[Part]:
        """The policy's weights (or a tensor-parallel part), gathered for generation: gathering layer by layer would be
        needed for every token. If these and `state` do not fit, nothing else needs to be tried."""
        actor = self.models[0]
        return [Part("actor: weights, gathered to answer", 0 if self._alone else actor.weights, ("rollout",))]

    def add_builtin_engine(self) -> None:
        options, actor, rows = self.options, self.models[0], self.work.rows
        assert isinstance(options, RLOptions)
        prompts = -(-options.prompts_under_way // (self.split.processes // self.split.tensor))
        slots = min(options.rollout_slots, prompts * options.n_samples_per_prompt)
        engine, parts = actor.engine_memory(options.rollout_kv_tokens), self.gathered_to_answer()
        free = max(0, self.hardware.memory - Memory(0, [*self.state, *parts]).during("rollout"))
        states = slots * engine.state_bytes
        size = engine.keys_and_values(slots, rows.longest, max(0, free - states)) if free else 0
        # The engine frees KV cache and states between rollouts if they are larger than the remaining memory.
        phases = PHASES if size + states <= free - size - states else ("rollout",)
        read = actor.scoring_bytes(max(1, min(engine.max_num_batched_tokens, prompts * rows.prompt)))
        parts.append(Part("a pass over prompts, or sampling tokens", max(read, self._sampling(slots)), ("rollout",)))
        if states:
            parts.append(Part(f"states of {slots:,} sequences", states, phases))
            parts.append(Part("states of prompts", states, ("rollout",)))  # or of a table that grows, for a moment
        if engine.token_bytes:  # some models cache no keys
            parts.append(Part(f"keys and values of {size // engine.token_bytes:,} tokens", size, phases))
            slots = min(slots, size // (rows.longest * engine.token_bytes))
        self.engine, self.rollout = EngineShare(actor.weights, size, slots, size / self.hardware.memory), parts

    def _vllm(self, engine: EngineShare) -> list[Part]:
        phases = ("rollout",) if self.sleep else PHASES
        return [
            Part("engine: weights", engine.weights, phases),
            Part("engine: keys and values", engine.keys_and_values, phases),
            Part("engine: sampling tokens", self._sampling(engine.slots), ("rollout",)),
        ]

    def _sampling(self, slots: int) -> int:
        assert isinstance(self.options, RLOptions)
        return sampling_bytes(slots, self.models[0].config.vocab_size, self.options)

    # ---- passes

    def _in_hand(self, model: PlannedModel) -> int:
        return model.root_weights + (LAYERS_IN_HAND + self.options.overlap_comm) * model.layer_weights

    def _gathered_keys(self, model: PlannedModel, tokens: int, kinds: int) -> int:
        """Bytes of the row's gathered keys and values and, in the backward pass, their gradients."""
        if self.split.context == 1:
            return 0
        return kinds * tokens * min(self.options.ring_head_stride, model.key_heads) * model.token_keys

    def _scoring(self, model: PlannedModel, tokens: int) -> int:
        options = self.options
        if isinstance(options, RLOptions) and self.hardware.accelerator:
            if "rollout_max_tokens_per_gpu" in options.given:
                tokens = options.rollout_max_tokens_per_gpu or tokens
            else:
                tokens = min(scoring_tokens(tokens), self.step_tokens)
        tokens = model.pass_tokens or tokens
        taken = model.scoring_bytes(-(-tokens // self.split.context)) + self._gathered_keys(model, tokens, SCORED_KEYS)
        if model.trained and not self._alone:
            return taken + (self._in_hand(model) if self.split.zero_stage == 3 else model.weights)
        return taken + (self._in_hand(model) if self.is_split(model) and not model.trained else 0)

    def _update(self, model: PlannedModel, tokens: int, recomputed: int | None) -> list[Part]:
        name, own = model.name, -(-tokens // self.split.context)
        taken = model.training_bytes(own, model.layers if recomputed == self.layers else recomputed)
        keys = self._gathered_keys(model, tokens, LEARNT_KEYS)
        return [
            *self._weights_and_gradients(model, tokens),
            Part(f"{name}: activations of {own:,} tokens", taken.kept, PASSES),
            Part(f"{name}: what a layer's backward pass adds", self._of_layers(taken), ("update",)),
            Part(f"{name}: keys and values of {tokens:,} tokens", keys, ("update",)),
            Part(f"{name}: what the head's backward pass adds", taken.head - taken.kept, ("loss",)),
        ]

    def _of_layers(self, taken: PassBytes) -> int:
        """What the backward pass adds after the head. Of several processes the embedding's is in the reduction."""
        return (max(taken.layers, taken.embedding) if self._alone else taken.layers) - taken.kept

    def _weights_and_gradients(self, model: PlannedModel, tokens: int) -> list[Part]:
        name, split, parts = model.name, self.split, self.parts_of(model)
        width = GRADIENT_DTYPES[self.options.grad_accum_dtype].itemsize
        if self._alone:
            return [Part(f"{name}: gradient sums", width * model.learnt, PASSES)]
        found = [Part(f"{name}: working weights, gathered", model.weights, PASSES)]
        if split.zero_stage == 3:
            found = [Part(f"{name}: embedding, head and two layers, gathered", self._in_hand(model), LEARNING)]
            if split.neighbours > 1:
                kept = model.weights // split.neighbours
                found.append(Part(f"{name}: working weights, 1 / {split.neighbours}", kept, PASSES))
        if self.passes(tokens) > 1 and keeps_unsharded_sums(model.learnt * split.tensor):
            return [
                *found,
                Part(f"{name}: gradient sums, whole", width * model.learnt, PASSES),
                Part(f"{name}: gradient sums, while they are split", width * model.learnt, ("reduction",)),
            ]
        working, sums = 2 if self.options.bf16 else 4, 4 * model.learnt // parts
        summed = (working + width) * model.learnt_layer
        last = (working + width) * model.learnt_root
        return [
            *found,
            Part(f"{name}: gradient sums, 1 / {parts}", sums if self.passes(tokens) > 1 else 0, PASSES),
            Part(f"{name}: gradients of a layer, and while they are summed", summed, ("update",)),
            Part(f"{name}: gradient of the head", working * model.learnt_head, ("update",)),
            Part(f"{name}: gradients, 1 / {parts}", sums, ("reduction",)),
            Part(f"{name}: gradients of embedding and head, while summed", last, ("reduction",)),
        ]

    # ---- the size of micro-batches

    def largest_doubling(self) -> Memory:
        """The largest micro-batches that fit among 1, 2, 4 and so on samples, or the smallest possible ones. Larger
        ones are faster, because every micro-batch costs communication."""
        best, size = self.at(self.work.least), 2 * self.work.least
        while best.fits(self.room) and size <= min(self.step_tokens, MOST_TOKENS):
            larger = self.at(size)
            if not larger.fits(self.room):
                break
            best, size = larger, 2 * size
        if self.step_tokens <= MOST_TOKENS and self.step_tokens < 2 * best.tokens:
            whole = self.at(self.step_tokens)  # a single micro-batch needs no gradient sums
            best = whole if whole.fits(self.room) else best
        return best

    def head_logits(self) -> int:
        """Bytes of fp32 logits that the chunked head holds at a time; 0 without such a head."""
        model = self.models[0]
        if not isinstance(model.whole.model, Policy):
            return 0
        vocabulary = model.config.vocab_size
        return min(self.work.tokens, chunk_tokens(vocabulary, model.whole.device, alone=True)) * vocabulary * 4


# ---- vLLM engines


def vllm_share(
    engines: Engines, options: RLOptions, hardware: Hardware, work: Work, actor: PlannedModel, utilization: float
) -> EngineShare:
    """The memory of an engine that may use this share of its devices."""
    device, rows = int(utilization * hardware.memory), work.rows
    weights = actor.weights // engines.tensor_parallel
    tokens = max(0, device - weights) * engines.tensor_parallel // max(1, actor.kv_token_bytes)
    alone = rows.longest  # KV tokens of a sequence without a shared prefix
    if options.enable_prefix_caching and rows.group > 1:
        alone = rows.answer + -(-rows.prompt // rows.group)
    samples = -(-options.prompts_under_way * options.n_samples_per_prompt // engines.number)
    slots = min(tokens // alone, options.rollout_slots, samples)
    return EngineShare(weights, max(0, device - weights), slots, utilization)
