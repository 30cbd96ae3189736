"""A plan for a job that is split over processes: what each of them needs as the options have it, and which of all
layouts that fit takes the least time."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from trimtab.config.groups import PASS_SIZES
from trimtab.errors import UserError
from trimtab.models.load import TrainedModelOptions
from trimtab.models.pretrained import first_line
from trimtab.plan.hardware import Hardware, Machines
from trimtab.plan.memory import PHASES, Memory
from trimtab.plan.models import PlannedModel, planned_models
from trimtab.plan.plan import refuse_unplannable
from trimtab.plan.split.candidates import candidates
from trimtab.plan.split.layout import CHANGED, Split
from trimtab.plan.split.share import ProcessShare
from trimtab.plan.split.step import SplitStep
from trimtab.plan.workload import Work, supposed


def share_of(options: TrainedModelOptions, hardware: Hardware, work: Work, processes: int) -> ProcessShare:
    """`hardware`: its memory is what one process has."""
    split = Split.of(options, processes)
    models = planned_models(options, work.rows, tensor=split.tensor, accelerator=hardware.accelerator)
    return ProcessShare(options, hardware, work, split, models)


@dataclass(frozen=True)
class Tried:
    """A layout and what it needs."""

    changes: dict[str, Any]
    """The options that ask for it."""
    share: ProcessShare
    memory: Memory
    seconds: dict[str, float]
    """Of a step, part by part."""

    @property
    def fits(self) -> bool:
        return self.memory.peak <= self.share.room

    @property
    def whole(self) -> float:
        return sum(self.seconds.values())

    @property
    def busiest(self) -> str:
        return max(PHASES, key=self.memory.during)


class SplitPlanner:
    """One job on some machines. Models are measured once for every way that their layers are cut and kept."""

    def __init__(self, options: TrainedModelOptions, machines: Machines):
        self.options, self.machines, self.work = options, machines, supposed(options)
        self._models: dict[tuple[int, bool, bool], list[PlannedModel]] = {}

    def models(self, tensor: int, *, checkpointing: bool, offload: bool = False) -> list[PlannedModel]:
        key = (tensor, checkpointing, offload)
        if key not in self._models:
            changes: dict[str, Any] = {"gradient_checkpointing": checkpointing, "offload_activations": offload}
            options = dataclasses.replace(self.options, **changes)
            self._models[key] = planned_models(options, self.work.rows, tensor=tensor)
        return self._models[key]

    def on(self, machines: Machines) -> "SplitPlanner":
        """The same job on others of the same devices."""
        other = SplitPlanner(self.options, machines)
        other._models = self._models
        return other

    def tried(self, changes: dict[str, Any]) -> Tried | None:
        """None: these options do not go together, or not on so many devices."""
        options = dataclasses.replace(self.options, **changes)
        checkpointing, offload = options.gradient_checkpointing, options.offload_activations
        try:
            split = Split.of(options, self.machines.devices)
            models = self.models(split.tensor, checkpointing=checkpointing, offload=offload)
        except UserError:  # a model beside the policy may be of a family that cannot be cut
            return None
        share = ProcessShare(options, self.machines.hardware, self.work, split, models)
        memory = share.given() if options.given & PASS_SIZES else share.proposed()
        plain = lambda: self.models(split.tensor, checkpointing=False)  # noqa: E731
        return Tried(changes, share, memory, SplitStep(share, self.machines, plain).seconds(memory))

    @cached_property
    def all(self) -> list[Tried]:
        whole = self.models(1, checkpointing=True)[0]
        config = whole.whole.model.config
        found = (self.tried(changes) for changes in candidates(self.options, self.machines, self.work, config))
        return [tried for tried in found if tried is not None]

    def as_asked(self) -> Tried | None:
        """The layout of the options, if they name one."""
        if not self.options.given & set(CHANGED):
            return None
        Split.of(self.options, self.machines.devices)
        return self.tried({name: getattr(self.options, name) for name in CHANGED})


def best(tried: Sequence[Tried]) -> Tried:
    """The fastest that fits; of those that are about as fast the one with the fewest flags. Else what comes nearest."""
    fitting = [found for found in tried if found.fits]
    if not fitting:
        return min(tried, key=lambda found: found.memory.peak)
    return min(fitting, key=lambda found: found.whole)


@dataclass(frozen=True)
class SplitPlan:
    planner: SplitPlanner
    asked: Tried | None
    proposed: Tried


def plan_split(options: TrainedModelOptions, machines: Machines) -> SplitPlan:
    refuse_unplannable(options)
    planner = SplitPlanner(options, machines)
    try:
        return SplitPlan(planner, planner.as_asked(), best(planner.all))
    except RuntimeError as error:  # a model that looks at contents, and here there are none
        raise UserError(f"--pretrain {options.pretrain} cannot be planned: {first_line(error)}") from error
