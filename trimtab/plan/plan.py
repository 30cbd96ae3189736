"""A plan: what a job needs on a device, whether it fits, how large its passes may be, how long a step takes."""

from dataclasses import dataclass
from typing import Any

from trimtab.config.jobs import RLOptions
from trimtab.errors import UserError
from trimtab.models.load import TrainedModelOptions
from trimtab.models.pretrained import first_line
from trimtab.plan.choosing import chosen_passes
from trimtab.plan.hardware import GIB, Hardware
from trimtab.plan.memory import FILL, PHASES, Memory, MemoryModel
from trimtab.plan.speed import StepTime, assumptions, clock_of, rates_of, step_time
from trimtab.plan.workload import Work, budget_changes, given_budget


@dataclass
class Plan:
    options: TrainedModelOptions
    hardware: Hardware
    work: Work
    memory: Memory
    time: StepTime | None
    head_logits: int
    layers: int
    proposed: bool
    """The size of the passes is the plan's; else it is the options'."""

    @property
    def fits(self) -> bool:
        return self.memory.peak <= FILL * self.hardware.memory

    @property
    def memory_gib(self) -> float:
        return self.memory.peak / GIB

    def lines(self) -> list[str]:
        hardware, memory = self.hardware, self.memory
        lines = [f"{self.options.verb} of {self.options.pretrain} on {hardware.name}, {hardware.memory / GIB:.1f} GiB"]
        lines += ["", "memory, GiB"]
        lines += [f"  {part.name:<46}{part.size / GIB:9.2f}{_when(part.phases)}" for part in memory.parts if part.size]
        if self.head_logits:
            lines.append(f"  {'(of it the chunked head, fp32 logits':<46}{self.head_logits / GIB:9.2f})")
        lines += [f"  {'peak':<46}{self.memory_gib:9.2f}   in the {self.busiest}"]
        lines += ["", *self._verdict()]
        if self.time is not None:
            lines += ["", *self._times()]
        return lines

    @property
    def busiest(self) -> str:
        return max(PHASES, key=self.memory.during)

    def _verdict(self) -> list[str]:
        share = self.memory.peak / self.hardware.memory
        if not self.fits:
            least = (
                "even with the smallest passes" if self.proposed else f"with passes of {self.memory.tokens:,} tokens"
            )
            return [
                f"does not fit {least}: {share:.0%} of the memory, and at most {FILL:.0%} should be used; "
                f"{self._advice()}"
            ]
        whose = "proposed passes" if self.proposed else "passes"
        lines = [f"fits: {whose} of {self.memory.tokens:,} tokens fill {share:.0%} of the memory"]
        if recomputation := self.recomputation():
            lines.append(f"  {recomputation}")
        if self.proposed:
            lines.append(f"  {' '.join(flags(self.changes()))}")
        return lines

    def recomputation(self) -> str:
        """What was chosen, in words; empty where the options say it."""
        if self.memory.recomputed is None:
            return ""
        verb = "recomputes" if self.memory.recomputed == 1 else "recompute"
        return f"{self.memory.recomputed or 'none'} of {self.layers} layers {verb}"

    def changes(self) -> dict[str, Any]:
        """Options, for what was chosen here."""
        return (budget_changes(self.options, self.memory.tokens) if self.proposed else {}) | self._recomputing()

    def _recomputing(self) -> dict[str, Any]:
        match self.memory.recomputed:
            case None:
                return {}
            case 0:
                return {"gradient_checkpointing": False, "gradient_checkpointing_layers": None}
            case number:
                return {"gradient_checkpointing_layers": None if number == self.layers else number}

    def _advice(self) -> str:
        options, ways = self.options, []
        if not self.proposed:
            ways.append("smaller passes")
        if not options.bf16:
            ways.append("--bf16")
        if not options.gradient_checkpointing:
            ways.append("--gradient_checkpointing")
        if not options.lora_rank:
            ways.append("--lora_rank 16")
        if not options.adam_offload:
            ways.append("--adam_offload")
        return f"try {', '.join(ways)}" if ways else "use a larger device or several"

    def _times(self) -> list[str]:
        assert self.time is not None
        step = "an iteration" if isinstance(self.options, RLOptions) else "a step"
        lines = [f"time of {step} of {self.time.tokens:,} tokens, about"]
        lines += [f"  {phase:<46}{seconds:9.3g} s" for phase, seconds in self.time.seconds.items()]
        lines += [f"  {'whole':<46}{self.time.whole:9.3g} s   {self.time.tokens / self.time.whole:,.0f} tokens/s"]
        rates = rates_of(self.options, self.hardware)
        return [*lines, f"  assumed: {assumptions(self.hardware, self.options.bf16, rates)}"]


def _when(phases: tuple[str, ...]) -> str:
    return "" if phases == PHASES else f"   in the {' and '.join(phases)}"


def make_plan(options: TrainedModelOptions, hardware: Hardware, work: Work, *, propose: bool) -> Plan:
    """`propose`: the plan chooses the size of passes, not the options."""
    refuse_unplannable(options)
    try:
        model = MemoryModel(options, hardware, work)
        clock = clock_of(model)
        memory = chosen_passes(model, clock, None if propose else given_budget(options, work))
    except RuntimeError as error:  # a model that looks at contents, and here there are none
        raise UserError(f"--pretrain {options.pretrain} cannot be planned: {first_line(error)}") from error
    time = None if clock is None else step_time(model, clock, memory)
    return Plan(options, hardware, work, memory, time, model.head_logits(), model.layers, propose)


def refuse_unplannable(options: TrainedModelOptions) -> None:
    if options.trainer == "tail":
        raise UserError("the models of a tail run are not planned; plan the grpo or ppo of the same sizes")
    if options.load_in_4bit:
        raise UserError("--load_in_4bit: 4-bit weights are not planned")
    if options.attn_implementation is not None:
        raise UserError("--attn_implementation: only the attention that is used by default is planned")


def budget_words(options: TrainedModelOptions, tokens: int) -> list[str]:
    return flags(budget_changes(options, tokens))


def flags(changes: dict[str, Any]) -> list[str]:
    return [f"--{name}" if value is True else f"--{name} {value}" for name, value in changes.items()]
