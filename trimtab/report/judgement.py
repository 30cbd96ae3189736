"""Whether two runs are the same training on two devices, or in two precisions: `trimtab compare`.

A pair passes if in every figure that is judged the weighted error is within the tolerance, the first step is within its
own where the figure has one, and the manifests agree in everything that changes what is learnt. The mean alone does not
tell: a run from another initial model comes down the same curve.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from trimtab.errors import UserError
from trimtab.report.agreement import Errors, Judged, Place, joined
from trimtab.report.differences import Differences, differences
from trimtab.report.numbers import percent, plural, short_number
from trimtab.report.read import Run, finite
from trimtab.report.subject import job_name

TOLERANCE = 0.02
FIRST_TOLERANCE = 0.001
"""Twice what bfloat16 does to a first step, and half of what another order does (docs/compare.md)."""
LOG_PROB_TOLERANCE = 0.005
"""The same of log-probs: a mean over few tokens, of which a first update may already have moved the later ones."""
DRAWN_TOLERANCE = 0.02
"""The same of the length of answers that each run draws itself: rounding makes single ones others."""
KL_FLOOR = 0.05
"""Nats a token. KL begins at 0, and rounding alone moves it by half a thousandth (docs/compare.md): with this floor a
difference counts from a thousandth on."""

LOSS = Judged("loss", "loss", first=FIRST_TOLERANCE)
KL = Judged("kl", "KL", floor=KL_FLOOR)
SAMPLED = (Judged("reward", "reward"), Judged("length", "answer length", first=DRAWN_TOLERANCE), KL)
REPLAYED = (
    Judged("log_prob", "log-prob of the answers", first=LOG_PROB_TOLERANCE),
    # Advantages of both signs cancel in the loss, so it is seen against their size.
    Judged("policy_loss", "policy loss", scale="advantage_size"),
    KL,
    Judged("grad_norm", "gradient norm"),
)

FROM_THE_RECORDING = ("tokens", "reward", "sampled_entropy")
"""What the rows of two runs have in common that learn from the same answers."""


@dataclass(frozen=True)
class Finding:
    """One figure of both runs."""

    judged: Judged
    places: Sequence[Place]
    errors: Errors
    tolerance: float
    as_recorded: bool = False
    """One of the runs has it from the other, so that it shows nothing: it is told, and not judged."""

    @property
    def words(self) -> str:
        return self.judged.words + (", as recorded" if self.as_recorded else "")

    def complaints(self) -> Iterator[str]:
        name, errors, first = self.judged.words, self.errors, self.judged.first
        if self.as_recorded:
            return
        if not errors.weighted <= self.tolerance:
            yield f"{name} is {share(errors.weighted)} apart, more than {share(self.tolerance)}"
        if first is not None and not errors.first <= first:
            yield f"{name} of the first step is {share(errors.first)} apart, more than {share(first)}"


@dataclass(frozen=True)
class Judgement:
    a: Run
    b: Run
    findings: Sequence[Finding]
    differences: Differences
    same_answers: bool
    """Of RL: both learnt from what one of them recorded."""

    @property
    def complaints(self) -> list[str]:
        """Why the pair does not pass."""
        return [*self.differences.disagreements, *(told for found in self.findings for told in found.complaints())]

    @property
    def passes(self) -> bool:
        return not self.complaints

    @property
    def verdict(self) -> str:
        if self.passes:
            return "A and B agree"
        if self.differences.disagreements:
            return "A and B are not the same training"
        return "A and B do not agree"

    def as_dict(self) -> dict[str, Any]:
        return {
            "a": str(self.a.folder),
            "b": str(self.b.folder),
            "passes": self.passes,
            "complaints": self.complaints,
            "same_answers": self.same_answers,
            "figures": {
                found.judged.metric: found.errors.as_dict()
                | {"tolerance": found.tolerance, "first_tolerance": found.judged.first}
                | {"as_recorded": found.as_recorded}
                for found in self.findings
            },
            "disagreements": self.differences.disagreements,
            "allowed_differences": self.differences.allowed,
        }

    def lines(self) -> Iterator[str]:
        """For a terminal."""
        yield f"A  {described(self.a)}"
        yield f"B  {described(self.b)}"
        if self.same_answers:
            yield "both learnt from the same recorded answers"
        yield ""
        table = [HEAD, *(row_of(found) for found in self.findings)]
        widths = [max(map(len, column)) for column in zip(*table)]
        for row in table:
            cells = [cell.rjust(width) for cell, width in zip(row[1:], widths[1:])]
            yield "  ".join([row[0].ljust(widths[0]), *cells])
        yield ""
        if not self.differences.disagreements:
            yield "the same: initial weights, trained parameters, data and their order, seed, settings"
        for told in self.differences.allowed:
            yield f"differs, as it may: {told}"
        yield f"{self.verdict}{': ' if self.complaints else ''}{'; '.join(self.complaints)}"


HEAD = ("", "weighted error", "first step", "mean relative", "mean absolute", "bias", "largest", "at step")


def row_of(found: Finding) -> tuple[str, ...]:
    errors = found.errors
    # A floor that decides is told, so that nobody reads a small share of it as agreement.
    floored = f" ({share(errors.without_floor)} without its floor)" if errors.without_floor != errors.weighted else ""
    return (
        found.words,
        share(errors.weighted) + floored,
        *(share(value) for value in (errors.first, errors.mean_relative)),
        *(short_number(value) for value in (errors.mean_absolute, errors.bias, errors.largest)),
        str(errors.largest_step),
    )


def described(run: Run) -> str:
    manifest = run.manifest
    made = f"{manifest.get('device', 'an unknown device')}, {manifest.get('dtype', 'unknown precision')}"
    return f"{run.folder}  {job_name(run)}, {plural(run.steps, run.unit)}, {made}"


def share(value: float) -> str:
    """As percents, with digits that show what is small."""
    return (
        percent(value, 1 if value >= 0.1 else 2 if value >= 0.001 else 4) if math.isfinite(value) else "without bound"
    )


def judge(
    a: Run, b: Run, *, tolerance: float = TOLERANCE, first_tolerance: float | None = None, most: int | None = None
) -> Judgement:
    """`first_tolerance`: instead of the figures' own; `most`: compare the first so many steps only."""
    if a.folder.resolve() == b.folder.resolve():
        raise UserError(f"{a.folder} is given twice; give two runs")
    _check_jobs(a, b)
    same_answers = _learn_from_the_same_answers(a, b)
    findings = []
    for judged in _figures(a, b, same_answers=same_answers):
        if judged.first is not None and first_tolerance is not None:
            judged = replace(judged, first=first_tolerance)
        places = joined(a, b, judged, most)
        as_recorded = judged is KL and same_answers and _shares_log_probs(a, b)
        findings.append(Finding(judged, places, Errors.of(places), tolerance, as_recorded))
    return Judgement(a, b, findings, differences(a, b, same_answers=same_answers), same_answers)


def _check_jobs(a: Run, b: Run) -> None:
    """One that is asked for by two names, as a preset and with all its options, is one job."""
    same = a.job == b.job
    if a.is_rl and b.is_rl and "tail" not in (a.job, b.job):
        same = same or job_name(a) == job_name(b)
    if not same:
        raise UserError(f"{a.folder} is {job_name(a)} and {b.folder} {job_name(b)}; give two runs of one job")


def _figures(a: Run, b: Run, *, same_answers: bool) -> list[Judged]:
    if not a.is_rl:
        return [LOSS]
    # A KL is there only with a reference.
    return [j for j in (REPLAYED if same_answers else SAMPLED) if j is not KL or a.series("kl") or b.series("kl")]


def _learn_from_the_same_answers(a: Run, b: Run) -> bool:
    """Whether one run replays what the other recorded, or both the same; a replay of something else is refused."""
    if not any(run.is_rl and (run.manifest.get("settings") or {}).get("replay") for run in (a, b)):
        return False
    in_a, in_b = ({row["step"]: row for row in run.rows} for run in (a, b))
    for step in sorted(in_a.keys() & in_b.keys()):
        for name in FROM_THE_RECORDING:
            x, y = finite(in_a[step].get(name)), finite(in_b[step].get(name))
            if x is not None and y is not None and not math.isclose(x, y, rel_tol=1e-5, abs_tol=1e-7):
                raise UserError(
                    f"{a.folder} and {b.folder} did not learn from the same answers (iteration {step}: {name} is "
                    f"{short_number(x)} and {short_number(y)}); record one of them and --replay that in the other"
                )
    return True


def _shares_log_probs(a: Run, b: Run) -> bool:
    """Whether a replay took the recorded log-probs of the policy, of which the KL is made, for its own. It does where
    it would compute the same ones: in fp32, with the built-in engine's whole weights, on one kind of device."""
    settings = [run.manifest.get("settings") or {} for run in (a, b)]
    rounded = any(known.get("rollout_engine") == "vllm" or known.get("weight_only_int8") for known in settings)
    kinds = {(run.manifest.get("device_type"), run.manifest.get("dtype")) for run in (a, b)}
    return not rounded and len(kinds) == 1 and a.manifest.get("dtype") == "float32"
