"""Time of an optimiser step of a job that is split over machines, part by part.

    arithmetic   the passes of every model over a process's tokens, divided by what a tensor or context group shares
    unhidden     weights that are gathered and gradients that are summed, less the arithmetic that goes on meanwhile
    tensor       a sum over the group after attention and after the feed-forward part of every layer, in every pass
    context      keys and values of the row gathered in every layer, gathered again and their gradients summed backwards
    optimiser    its state read and written, in main memory where it is offloaded
    moving       activations to main memory and back

Nothing hides the last four. As with one device it is for choosing between layouts: good to a factor of two.
"""

from collections.abc import Callable

from trimtab.distributed.fsdp import GRADIENT_DTYPES, keeps_whole_sums
from trimtab.plan.hardware import MAIN_MEMORY, Machines
from trimtab.plan.memory import Memory
from trimtab.plan.models import PlannedModel
from trimtab.plan.speed import (
    BANDWIDTH_SHARE,
    COUNTED_TOKENS,
    OPTIMISER_BYTES,
    SPLIT,
    size,
)
from trimtab.plan.split.share import ProcessShare

PARTS = ("arithmetic", "unhidden", "tensor", "context", "optimiser", "moving")
SUMS_OF_A_LAYER = 2  # over a tensor group, in a pass


class SplitStep:
    """Of one layout. `plain`: the same models without checkpointing, whose activations go through memory."""

    def __init__(self, share: ProcessShare, machines: Machines, plain: Callable[[], list[PlannedModel]]):
        self.share, self.machines, self.plain = share, machines, plain
        self.options, self.split = share.options, share.split
        flops, bandwidth = machines.hardware.flops(self.options.bf16), machines.hardware.bandwidth
        assert flops is not None and bandwidth is not None
        self.flops, self.bandwidth = flops, BANDWIDTH_SHARE * bandwidth

    def seconds(self, memory: Memory) -> dict[str, float]:
        found = dict.fromkeys(PARTS, 0.0)
        passes = self.share.passes(memory.tokens)
        for model, plain in zip(self.share.models, self.plain(), strict=True):
            measure = self._trained if model.trained else self._scored
            for part, value in measure(model, plain, passes).items():
                found[part] += value
        return found

    @property
    def _own_tokens(self) -> float:
        return self.share.step_tokens / self.split.context

    def _operations(self, model: PlannedModel) -> float:
        """Of a token's forward pass in one process."""
        attention = 2 * self.share.work.rows.longest * size(model.whole) / self.split.tensor
        return 2 * model.multiplied + attention

    def _traffic(self, plain: PlannedModel, times: float) -> float:
        counted = min(COUNTED_TOKENS, self.share.work.tokens)
        return times * plain.training_bytes(counted).kept / counted / self.bandwidth

    def _scored(self, model: PlannedModel, plain: PlannedModel, passes: int) -> dict[str, float]:
        arithmetic = self._own_tokens * self._operations(model) / (self.flops * SPLIT.scoring)
        sending = 0.0
        if self.split.zero_stage == 3 or model.offload:
            sending = passes * self.machines.gathering(model.weights, self.share.parts_of(model), self.split.tensor)
        return {"arithmetic": arithmetic, "unhidden": max(0.0, sending - arithmetic)} | self._in_layers(model, 1, 1)

    def _trained(self, model: PlannedModel, plain: PlannedModel, passes: int) -> dict[str, float]:
        options, split, machines = self.options, self.split, self.machines
        again = int(options.gradient_checkpointing)
        times = (2 if options.lora_rank else 3) + again
        arithmetic = times * self._operations(model) / (self.flops * SPLIT.arithmetic)
        arithmetic += self._traffic(plain, SPLIT.forward * (1 + again) + SPLIT.backward)
        arithmetic *= self._own_tokens
        sending = self._sent(model, passes)
        state = OPTIMISER_BYTES * model.learnt / split.parts
        optimiser = state / self.bandwidth
        if options.adam_offload:
            width = GRADIENT_DTYPES[options.grad_accum_dtype].itemsize
            optimiser = state / MAIN_MEMORY + machines.moving((width + 4) * model.learnt / split.parts)
        moving = 0.0
        if options.offload_activations:
            config = model.whole.model.config.get_text_config()
            inputs = len(model.layers) * config.hidden_size * (2 if options.bf16 else 4)  # of a token
            moving = 2 * machines.moving(self._own_tokens * inputs)
        found = {"arithmetic": arithmetic, "unhidden": max(0.0, sending - arithmetic), "optimiser": optimiser}
        return found | {"moving": moving} | self._in_layers(model, 2 + again, 3 + again)

    def _sent(self, model: PlannedModel, passes: int) -> float:
        """Seconds in which weights are gathered and gradients summed."""
        options, split, machines = self.options, self.split, self.machines
        gathering = machines.gathering(model.weights, split.parts, split.tensor)
        if split.zero_stage == 3:
            near = machines.gathering(model.weights, split.neighbours) if split.neighbours > 1 else gathering
            gathered = passes * (gathering + near)
        else:
            gathered = passes * gathering
        gradients = GRADIENT_DTYPES[options.grad_accum_dtype].itemsize * model.learnt
        summed = 1 if keeps_whole_sums(model.learnt * split.tensor) else passes
        sums = machines.gathering(gradients, split.parts, split.tensor)
        copies = machines.gathering(2 * gradients / split.parts, split.replicate, split.tensor * split.parts)
        return gathered + summed * (sums + copies)

    def _in_layers(self, model: PlannedModel, sums: int, gathers: int) -> dict[str, float]:
        """What a layer waits for: `sums`, `gathers`: how often in a step, forwards and backwards."""
        split, machines, layers = self.split, self.machines, len(model.layers)
        config = model.whole.model.config.get_text_config()
        width = config.hidden_size * (2 if self.options.bf16 else 4)
        states = SUMS_OF_A_LAYER * sums * layers * self._own_tokens * width
        keys = gathers * layers * self.share.step_tokens * 2 * model.key_heads * model.head_bytes
        return {
            "tensor": machines.gathering(2 * states, split.tensor),  # summed, and the sum given to all
            "context": machines.gathering(keys, split.context, split.tensor),
        }
