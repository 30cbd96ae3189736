"""Memory of a job, part by part, in each phase of a step; and the largest pass that there is room for.

rollout   weights and optimiser state of everything, keys and values, a pass over prompts
scoring   the same without the pass over prompts, and one without gradients
update    the same, with gradient sums, activations, and what the backward pass needs beside them
reduction where a model is split: the end of the backward pass, when no activations are left and all gradients are there
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property

from trimtab.config.jobs import RLOptions
from trimtab.models.lm_head import chunk_tokens
from trimtab.models.load import TrainedModelOptions
from trimtab.models.policy import Policy
from trimtab.plan.fake_model import Pretended
from trimtab.plan.hardware import Hardware
from trimtab.plan.workload import Work, frozen_models, scoring_tokens, trained_models
from trimtab.rollout.factory import EngineMemory

FILL = 0.85  # of a device's memory; the rest is for what is not seen here, and for gaps between tensors
MOST_TOKENS = 2**17  # larger passes are no faster
SAMPLED_COPIES = 3  # fp32 matrices [answers, vocabulary] while tokens are drawn, and
PENALISED_COPIES = 3  # so many more with a repetition penalty

PHASES = ("rollout", "scoring", "update", "reduction")


@dataclass(frozen=True)
class Part:
    name: str
    size: int
    phases: tuple[str, ...] = PHASES


@dataclass
class Memory:
    """The parts of a job whose passes have so many tokens."""

    tokens: int
    parts: list[Part] = field(default_factory=list)
    recomputed: int | None = None
    """Layers that recompute, where it is not the options that say it."""

    def during(self, phase: str) -> int:
        return sum(part.size for part in self.parts if phase in part.phases)

    @property
    def peak(self) -> int:
        return max(self.during(phase) for phase in PHASES)

    def fits(self, room: int) -> bool:
        return self.peak <= room


def drawing(options: RLOptions, slots: int, vocabulary: int) -> int:
    """Bytes while the built-in engine draws tokens."""
    copies = SAMPLED_COPIES + (PENALISED_COPIES if options.repetition_penalty != 1 else 0)
    return copies * slots * vocabulary * 4


class MemoryModel:
    """One job on one device: everything that does not depend on the size of its passes is measured once."""

    def __init__(self, options: TrainedModelOptions, hardware: Hardware, work: Work):
        self.options, self.hardware, self.work = options, hardware, work
        accelerator = hardware.accelerator
        self.trained = {
            name: Pretended(model, options, accelerator=accelerator) for name, model in trained_models(options).items()
        }
        self.frozen = {
            found: Pretended(found.model, options, accelerator=accelerator, frozen=True)
            for found in frozen_models(options)
        }
        self.state = [Part("the program", hardware.program)]
        for name, model in self.trained.items():
            self.state += self._state_of(name, model)
        for found, model in self.frozen.items():
            phases = ("scoring",) if found.offload and accelerator else PHASES
            self.state.append(Part(f"{found.name}: weights", model.weights(), phases))

    def _state_of(self, name: str, model: Pretended) -> list[Part]:
        options = self.options
        parts = [Part(f"{name}: working weights", model.weights())]
        if not (options.adam_offload and self.hardware.accelerator):
            parts += [Part(f"{name}: fp32 masters", model.masters())]
            parts += [Part(f"{name}: Adam's moments", 8 * model.trained())]
            if isinstance(options, RLOptions) and options.enable_ema and name == "actor":
                parts.append(Part(f"{name}: average (EMA)", 4 * model.trained()))
        return parts

    @cached_property
    def layers(self) -> int:
        """As many may recompute by number: more than a model has would be refused."""
        return min(model.layers for model in self.trained.values())

    def at(self, tokens: int, recomputed: int | None = None) -> Memory:
        """`tokens`: of a training pass, if a step has so many; `recomputed`: layers that recompute, or what the options
        say."""
        options, work = self.options, self.work
        tokens = min(tokens, work.tokens)
        memory = Memory(tokens, list(self.state), recomputed)
        if isinstance(options, RLOptions):
            memory.parts += self._rollout
        read = self._scored_tokens(tokens)
        scored = [model.scoring_pass(work.rows, found.pass_tokens or read) for found, model in self.frozen.items()]
        if isinstance(options, RLOptions):
            scored += [model.scoring_pass(work.rows, read) for model in self.trained.values()]
        if scored:
            memory.parts.append(Part("a pass of scoring", max(scored), ("scoring",)))
        # Actor and critic take turns: the one that needs more decides.
        updates = [self._update(name, model, tokens, recomputed) for name, model in self.trained.items()]
        memory.parts += max(updates, key=total)
        return memory

    def _scored_tokens(self, tokens: int) -> int:
        """Of a pass of scoring."""
        options = self.options
        if not isinstance(options, RLOptions) or not self.hardware.accelerator:
            return tokens
        if "rollout_max_tokens_per_gpu" in options.given:
            return options.rollout_max_tokens_per_gpu or tokens
        return min(scoring_tokens(tokens), self.work.tokens)

    def _update(self, name: str, model: Pretended, tokens: int, recomputed: int | None) -> list[Part]:
        every = model.layers if recomputed == self.layers else recomputed
        taken = model.training_pass(self.work.rows, tokens, every)
        return [
            Part(f"{name}: gradient sums", model.gradient_sums(), ("update",)),
            Part(f"{name}: activations of {tokens:,} tokens", taken.kept, ("update",)),
            Part(f"{name}: what the backward pass adds", taken.peak - taken.kept, ("update",)),
        ]

    @cached_property
    def _engine(self) -> EngineMemory:
        assert isinstance(self.options, RLOptions)
        actor = self.trained["actor"]
        with actor.mode:
            return EngineMemory(actor.model, self.options.rollout_kv_tokens)

    @property
    def kv_token_bytes(self) -> int:
        return self._engine.token_bytes

    @cached_property
    def _rollout(self) -> list[Part]:
        options, actor = self.options, self.trained["actor"]
        assert isinstance(options, RLOptions)
        slots = min(options.rollout_slots, options.prompts_under_way * options.n_samples_per_prompt)
        free = self.hardware.memory - Memory(0, self.state).during("rollout")
        size = self._engine.keys_and_values(slots, self.work.rows.longest, free)
        # The engine gives it back between rollouts if it is more than what is left.
        phases = PHASES if size <= free - size else ("rollout",)
        prompts = options.rollout_batch_size * self.work.rows.prompt
        read = actor.scoring_pass(self.work.rows, min(self._engine.max_num_batched_tokens, prompts))
        drawn = drawing(options, slots, actor.model.head.out_features)
        return [
            Part(f"keys and values of {size // self.kv_token_bytes:,} tokens", size, phases),
            Part("a pass over prompts, or drawing tokens", max(read, drawn), ("rollout",)),
        ]

    @property
    def room(self) -> int:
        return int(FILL * self.hardware.memory)

    def head_logits(self) -> int:
        """fp32 logits that the chunked head holds at a time; none where there is no such head."""
        model = next(iter(self.trained.values()))
        if not isinstance(model.model, Policy):
            return 0
        vocabulary = model.model.config.get_text_config().vocab_size
        return min(self.work.tokens, chunk_tokens(vocabulary, model.device, alone=True)) * vocabulary * 4


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


def total(parts: Iterable[Part]) -> int:
    return sum(part.size for part in parts)
