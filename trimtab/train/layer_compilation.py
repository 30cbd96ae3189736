"""Whether torch.compile pays off for a run's layers: decided once before the first step and stored in checkpoints.

With --compile auto, layers are compiled where the time saved over all steps exceeds the time to compile. The saving is
in everything but the matrix products, which is proportional to tokens x layers x hidden size.
"""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trimtab.distributed.device import Device, has_kernels
from trimtab.distributed.mesh import Mesh
from trimtab.models.compile import AtWork, Gradients, compile_layers, compile_problem, disable_compile, require_compiler
from trimtab.models.load import TrainedModelOptions
from trimtab.models.packed import PackedModel
from trimtab.train.optimizer import Optimizer
from trimtab.train.task import SupervisedTask

COMPILATION = 15.0
"""Seconds to compile a model's layers."""
SAVED = 1.1e-10
"""Seconds saved per token, layer and hidden unit, forward and backward: 220 ms for 65,000 tokens in 32 layers of width
960, on an H200."""
OF_SCORING = 0.35
"""Share of that saving in a forward pass alone."""


@dataclass(frozen=True)
class CompileDecision:
    """Whether one model's layers are compiled, why not, and the seconds it took."""

    compiled: bool
    problem: str = ""
    seconds: float = 0.0

    def line(self, name: str) -> str | None:
        """A line for the log, or None if nothing was tried."""
        if self.problem:
            return f"layers of the {name} are not compiled: {self.problem}"
        return f"layers of the {name} are compiled, in {self.seconds:.0f} s" if self.compiled else None


def compile_report(settled: Sequence[CompileDecision], name: str) -> dict[str, Any]:
    """Summary over the models of a role, as plain values that can be sent to another process."""
    return {
        "compiled": any(found.compiled for found in settled),
        "seconds": sum(found.seconds for found in settled),
        "lines": [line for found in settled if (line := found.line(name))],
    }


class SupervisedCompilation:
    """Compilation of the models of a supervised run. `decided`: by model, whether it is compiled; None: undecided."""

    def __init__(self, options: TrainedModelOptions, device: Device, mesh: Mesh):
        self.options, self.device, self.mesh = options, device, mesh
        self.decided: dict[str, bool] | None = None
        self._seconds = 0.0

    def settle(self, model: PackedModel, optimizer: Optimizer, task: SupervisedTask) -> dict[str, bool]:
        """Decide and compile, before the first step of a new or resumed run."""
        tokens = float(task.lengths(task.store).mean()) * self.options.train_batch_size * task.order().steps
        # With LoRA, the model without its adapter is the reference.
        scores: list[AtWork] = [scorer.at_work for scorer in task.scorers.values() if scorer.model is model]
        if task.evaluation_samples or task.scores_model:
            scores.append(contextlib.nullcontext)
        found = {"model": self._settle("model", model, scores, tokens, optimizer.take_gradients)}
        for name, scorer in task.scorers.items():
            if scorer.model is not model:
                found[name] = self._settle(name, scorer.model, [scorer.at_work], tokens)
        self.decided = found
        return found

    def _settle(
        self, name: str, root: PackedModel, scores: list[AtWork], tokens: float, gradients: Gradients | None = None
    ) -> bool:
        learnt, scored = (tokens, tokens * len(scores)) if gradients else (0.0, tokens)
        settled = compile_if_worthwhile(
            self.options,
            root,
            self.device,
            self.mesh,
            learnt=learnt,
            scored=scored,
            decided=None if self.decided is None else self.decided.get(name, False),
            scores=scores,
            gradients=gradients,
        )
        if line := settled.line(name):
            self.mesh.world.say(line)
        self._seconds += settled.seconds
        return settled.compiled

    def look(self, model: PackedModel, task: SupervisedTask) -> bool:
        """Before a step: whether compiled layers failed in any process, so that all went back to eager ones."""
        if not self.decided or not any(self.decided.values()):
            return False
        roots = [model, *(scorer.model for scorer in task.scorers.values())]
        problems = [problem for root in roots if (problem := compile_problem(root))]
        if (problem := first_problem(self.mesh, problems[0] if problems else "")) == "":
            return False
        for root in roots:
            disable_compile(root)
        self.decided = dict.fromkeys(self.decided, False)
        self.mesh.world.say(gave_up_line(problem))
        return True

    def columns(self) -> dict[str, float]:
        """Columns for the first row of metrics."""
        seconds, self._seconds = self._seconds, 0.0
        return {"seconds_compile": seconds} if seconds else {}


def compile_if_worthwhile(
    options: TrainedModelOptions,
    root: PackedModel,
    device: Device,
    mesh: Mesh,
    *,
    learnt: float = 0.0,
    scored: float = 0.0,
    decided: bool | None = None,
    scores: Sequence[AtWork],
    gradients: Gradients | None = None,
) -> CompileDecision:
    """Compile the layers of a model if the options or the expected saving say so. All processes of the model must call
    it.

    `learnt`, `scored`: tokens trained and scored over the whole run; `decided`: the decision of the run this one
    resumes;
    `scores`: context managers in which the model scores; `gradients`: takes the gradients of a backward pass, for a
    trained model.
    """
    if root.attention.fused:
        return CompileDecision(False)
    hindrance = "--compile off" if options.compile == "off" else options.not_compiled
    if decided and hindrance is not None:
        return CompileDecision(False, f"resumed with {hindrance}, not bit for bit the uninterrupted run")
    if decided is False and options.compile == "on":
        return CompileDecision(False, "the run began, or went on, with plain ones")
    if not (is_worth_it(options, root, device, learnt, scored) if decided is None else decided):
        return CompileDecision(False)
    trial = compile_layers(
        root,
        scores=scores,
        gradients=gradients,
        router=gradients is not None and options.aux_loss_coef > 0,
    )
    if problem := first_problem(mesh, trial.problem):
        disable_compile(root)
    return CompileDecision(not problem, problem, trial.seconds)


def first_problem(mesh: Mesh, problem: str) -> str:
    """The first problem reported by any process, so that all processes decide alike."""
    return next((found for found in mesh.all.gather(problem) if found), "")


def gave_up_line(problem: str) -> str:
    return f"compiled layers are given up from this step on: {problem}"


def is_worth_it(options: TrainedModelOptions, root: PackedModel, device: Device, learnt: float, scored: float) -> bool:
    if options.compile == "off":
        return False
    if options.compile == "on":
        require_compiler(device.torch)
        return True
    if options.not_compiled is not None or not has_kernels(device.torch):
        return False
    config = root.config.get_text_config()
    numbers = config.num_hidden_layers * config.hidden_size * (learnt + OF_SCORING * scored)
    return numbers * SAVED > COMPILATION
