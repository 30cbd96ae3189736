"""Memory of one process of a split job, part by part.

    masters, moments, frozen weights   split over `Split.parts` processes, whatever the stage
    working weights   --zero_stage 3: the embedding, the head and two layers are gathered at a time;
                      else all are, from the forward pass on (PyTorch's FSDP2 keeps a copy, in fp32 too)
    gradients         whole sums between the passes of a step, if they are small (distributed/sharding); else split
                      after every layer's backward pass, of which the last one's whole gradient is in hand
    activations       of this process's tokens: 1 / --ring_attn_size of a row. With --ds_tensor_parallel_size a layer's
                      inner ones are cut and the residual stream is not
    keys and values   of the whole row, --ring_head_stride heads of them at a time, and as many gradients

Everything but the last is of a model whose layers are cut in `Split.tensor` (narrowing.py).
"""

from collections.abc import Sequence

from trimtab.config.rl_jobs import RLOptions
from trimtab.distributed.fsdp import GRADIENT_DTYPES, keeps_whole_sums
from trimtab.models.load import TrainedModelOptions
from trimtab.plan.hardware import Hardware
from trimtab.plan.memory import FILL, MOST_TOKENS, Memory, Part, total
from trimtab.plan.models import PlannedModel
from trimtab.plan.split.layout import Split
from trimtab.plan.split.rollout import rollout_parts
from trimtab.plan.workload import Work, given_budget

LAYERS_IN_HAND = 2  # gathered at a time: the one that works and the next
LEARNING = ("update", "reduction")
# Keys or values of a row, of as many heads as are gathered at a time: as they come, in order, and the next ones; in a
# backward pass with their gradients, and these on their way back.
SCORED_KEYS, LEARNT_KEYS = 6, 10


class ProcessShare:
    def __init__(
        self,
        options: TrainedModelOptions,
        hardware: Hardware,
        work: Work,
        split: Split,
        models: Sequence[PlannedModel],
    ):
        """`hardware`: the memory is what one process has of it. `models`: cut in `split.tensor`."""
        self.options, self.hardware, self.work, self.split, self.models = options, hardware, work, split, models
        self.sizes = options.group_sizes(split.processes) if isinstance(options, RLOptions) else {}
        self.state = [Part("the program", hardware.program)]
        for model in models:
            self.state += self._learner(model) if model.trained else self._scorer(model)

    @property
    def room(self) -> int:
        return int(FILL * self.hardware.memory)

    @property
    def step_tokens(self) -> int:
        """Of a process, or of those that work on a row together."""
        return max(self.work.least, -(-self.work.tokens // self.split.data))

    def passes(self, tokens: int) -> int:
        return -(-self.step_tokens // tokens)

    def given(self) -> Memory:
        """With passes as the options have them."""
        return self.at(given_budget(self.options, self.work))

    def proposed(self) -> Memory:
        """The largest passes that fit, or the smallest possible ones: a sample, two, four, and so on."""
        best, size = self.at(self.work.least), 2 * self.work.least
        while best.peak <= self.room and size <= min(self.step_tokens, MOST_TOKENS):
            larger = self.at(size)
            if larger.peak > self.room:
                break
            best, size = larger, 2 * size
        if self.step_tokens <= MOST_TOKENS and self.step_tokens < 2 * max(best.tokens, self.work.least):
            whole = self.at(self.step_tokens)  # in one pass: no gradient sums are kept
            best = whole if whole.peak <= self.room else best
        return best

    def at(self, tokens: int) -> Memory:
        """`tokens`: of a row, which a context group works on together."""
        tokens = min(tokens, self.step_tokens)
        own = -(-tokens // self.split.context)
        memory = Memory(tokens, list(self.state))
        if isinstance(self.options, RLOptions):
            memory.parts += rollout_parts(self, Memory(0, self.state).during("rollout"))
        scorers = self.models if isinstance(self.options, RLOptions) else [m for m in self.models if not m.trained]
        if scorers:
            scored = [self._scoring(model, tokens, own) for model in scorers]
            memory.parts.append(Part("a pass of scoring, and layers in hand", max(scored), ("scoring",)))
        # Actor and critic take turns: the one that needs more decides.
        memory.parts += max((self._update(m, tokens, own) for m in self.models if m.trained), key=total)
        return memory

    # ---- state

    def parts_of(self, model: PlannedModel) -> int:
        """Over how many processes a model is split: the same as the policy, or as many as it is in. What only scores is
        split over all where the trained one has nothing but copies."""
        processes = self.sizes.get(model.role, self.split.processes)
        all_of_them = max(1, processes // self.split.tensor)
        alone = not model.trained and self.split.parts == self.split.context
        return all_of_them if alone else min(self.split.parts, all_of_them)

    def _learner(self, model: PlannedModel) -> list[Part]:
        options, parts = self.options, self.parts_of(model)
        found = []
        if not (options.adam_offload and self.hardware.accelerator):
            average = isinstance(options, RLOptions) and options.enable_ema and model.role == "actor"
            found.append(Part(f"{model.name}: fp32 masters, 1 / {parts}", 4 * model.learnt // parts))
            found.append(Part(f"{model.name}: Adam's moments, 1 / {parts}", 8 * model.learnt // parts))
            if average:
                found.append(Part(f"{model.name}: average (EMA), 1 / {parts}", 4 * model.learnt // parts))
            found.append(Part(f"{model.name}: frozen weights, 1 / {parts}", model.frozen_weights // parts))
        return found

    def _scorer(self, model: PlannedModel) -> list[Part]:
        away = model.offload and self.hardware.accelerator
        if not self._scorer_is_split(model):
            return [Part(f"{model.name}: weights", model.weights)]
        return [] if away else [Part(f"{model.name}: weights", model.weights // self.parts_of(model))]

    def _scorer_is_split(self, model: PlannedModel) -> bool:
        return self.options.splits_frozen(offload=model.offload)

    # ---- passes

    def _in_hand(self, model: PlannedModel) -> int:
        return model.root_weights + (LAYERS_IN_HAND + self.options.overlap_comm) * model.layer_weights

    def _gathered_keys(self, model: PlannedModel, tokens: int, kinds: int) -> int:
        """Of the whole row: keys and values, and in the backward pass their gradients."""
        if self.split.context == 1:
            return 0
        return kinds * tokens * min(self.options.ring_head_stride, model.key_heads) * model.head_bytes

    def _scoring(self, model: PlannedModel, tokens: int, own: int) -> int:
        tokens, own = (min(size, model.pass_tokens or size) for size in (tokens, own))
        taken = model.scoring_bytes(own) + self._gathered_keys(model, tokens, SCORED_KEYS)
        if model.trained:
            return taken + (self._in_hand(model) if self.split.zero_stage == 3 else model.weights)
        return taken + (self._in_hand(model) if self._scorer_is_split(model) else 0)

    def _update(self, model: PlannedModel, tokens: int, own: int) -> list[Part]:
        options, parts, name = self.options, self.parts_of(model), model.name
        working = 2 if options.bf16 else 4
        width = GRADIENT_DTYPES[options.grad_accum_dtype].itemsize
        whole = self.passes(tokens) > 1 and keeps_whole_sums(model.learnt * self.split.tensor)
        learnt_layer, learnt_root = model.learnt_layer, model.learnt_root
        found = []
        if self.split.zero_stage == 3:
            found.append(Part(f"{name}: embedding, head and two layers, gathered", self._in_hand(model), LEARNING))
            if self.split.neighbours > 1:
                kept = model.weights // self.split.neighbours
                found.append(Part(f"{name}: working weights, 1 / {self.split.neighbours}", kept, ("update",)))
        else:
            found.append(Part(f"{name}: working weights, gathered", model.weights, ("update",)))
        split_sums = 4 * model.learnt // parts
        if whole:
            found.append(Part(f"{name}: gradient sums, whole", width * model.learnt, ("update",)))
            found.append(Part(f"{name}: gradient sums, while they are split", width * model.learnt, ("reduction",)))
        else:
            earlier = split_sums if self.passes(tokens) > 1 else 0
            flying = (working + width) * learnt_layer
            found.append(Part(f"{name}: gradient sums, 1 / {parts}", earlier, ("update",)))
            found.append(Part(f"{name}: gradients of a layer, and while they are summed", flying, ("update",)))
            found.append(Part(f"{name}: gradients of embedding and head", working * learnt_root, ("update",)))
            found.append(Part(f"{name}: gradients, 1 / {parts}", split_sums, ("reduction",)))
            last = (working + width) * learnt_root
            found.append(Part(f"{name}: gradients of embedding and head, while summed", last, ("reduction",)))
        taken = model.training_bytes(own)
        found.append(Part(f"{name}: activations of {own:,} tokens", taken.kept, ("update",)))
        found.append(Part(f"{name}: what the backward pass adds", taken.peak - taken.kept, ("update",)))
        gathered = self._gathered_keys(model, tokens, LEARNT_KEYS)
        found.append(Part(f"{name}: keys and values of {tokens:,} tokens", gathered, ("update",)))
        return found
