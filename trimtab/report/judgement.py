"""How far two runs are apart in one figure, step by step. The runs are A, which is compared with, and B.

    weighted relative error   sum |b - a| / sum size,   size = |a|, at least `floor` and at least the row's `scale`
    mean relative error       mean of |b - a| / size
    mean absolute error       mean of |b - a|
    bias                      mean of b - a: errors of one sign do not cancel in it
    first step                |b - a| / size there, before anything that was learnt can differ

The weighted error is what the guides of other devices ask for, freed of the unit of the loss: large values weigh more,
so that a loss near zero at the end of a run does not decide alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from html import escape
from pathlib import Path
from statistics import fmean
from typing import Any

from trimtab.config.data_options import EnvironmentOptions
from trimtab.config.objective_options import RewardSourceOptions
from trimtab.config.placement_options import COLOCATING, ROLES
from trimtab.config.rl_jobs import OF_ALL_ANSWERS, OF_EVALUATION, OF_SAMPLING
from trimtab.config.rl_options import AsyncOptions, RecordingOptions
from trimtab.errors import UserError
from trimtab.report.charts import Line, chart
from trimtab.report.formatting import percent, plain, plural, short_number, spans, table
from trimtab.report.page import place, sentence, static_page, write_page
from trimtab.report.run_data import MANIFEST, RunData, finite
from trimtab.report.summary import defaults_of, job_name

FEWEST_STEPS = 5
"""Fewer do not show where two runs are going."""


@dataclass(frozen=True)
class Judged:
    """A number of the metrics rows in which two runs are to agree."""

    metric: str
    words: str
    floor: float = 0.0
    """What lies below it counts as much as the floor: for what begins at zero."""
    scale: str = ""
    """Another number of the row, as large as this one would be if its terms did not cancel."""
    first: float | None = None
    """How far apart the first step may be; None: that is told, and not judged."""


@dataclass(frozen=True)
class Place:
    """One step in both runs."""

    step: int
    a: float
    b: float
    own: float
    """What the difference is seen against: the size of A's value, or its scale."""
    floor: float = 0.0

    @property
    def size(self) -> float:
        return max(self.own, self.floor)

    @property
    def difference(self) -> float:
        return self.b - self.a

    @property
    def relative(self) -> float:
        return _over(abs(self.difference), self.size)


@dataclass(frozen=True)
class Errors:
    """What is said of one figure."""

    steps: int
    weighted: float
    without_floor: float
    """The weighted error if no floor held it down: what a reader would compute."""
    mean_relative: float
    mean_absolute: float
    bias: float
    largest: float
    largest_step: int
    first: float
    first_step: int

    @classmethod
    def of(cls, places: Sequence[Place]) -> Errors:
        differences = [abs(place.difference) for place in places]
        worst = max(places, key=lambda place: abs(place.difference))
        return cls(
            steps=len(places),
            weighted=_over(math.fsum(differences), math.fsum(place.size for place in places)),
            without_floor=_over(math.fsum(differences), math.fsum(place.own for place in places)),
            mean_relative=fmean(place.relative for place in places),
            mean_absolute=fmean(differences),
            bias=fmean(place.difference for place in places),
            largest=worst.difference,
            largest_step=worst.step,
            first=places[0].relative,
            first_step=places[0].step,
        )

    def as_dict(self) -> dict[str, Any]:
        """As JSON has it, which has no infinity."""
        return {name: value if finite(value) is not None else None for name, value in asdict(self).items()}


def joined(a: RunData, b: RunData, judged: Judged, most: int | None = None) -> list[Place]:
    """The steps of both runs, or the first `most`. Steps that only one of them has cannot be compared."""
    in_a, in_b = ({row["step"]: row for row in run.rows if 0 < row["step"] <= (most or math.inf)} for run in (a, b))
    _check_steps(a, in_a, b, in_b)
    places = []
    for step in sorted(in_a):
        if judged.metric not in in_a[step] and judged.metric not in in_b[step]:
            continue  # such as the policy's loss while the critic learns alone
        first, second = _value(a, in_a[step], judged), _value(b, in_b[step], judged)
        own = max(abs(first), finite(in_a[step].get(judged.scale)) or 0.0)
        places.append(Place(step, first, second, own, judged.floor))
    if len(places) < FEWEST_STEPS:
        raise UserError(
            f"{a.folder} and {b.folder}: {judged.words} is there in {plural(len(places), a.unit)} of both; at least "
            f"{FEWEST_STEPS} are needed to compare them"
        )
    return places


def _value(run: RunData, row: dict[str, Any], judged: Judged) -> float:
    value = finite(row.get(judged.metric))
    if value is None:
        raise UserError(
            f"{run.folder}: {judged.words} of {run.unit} {row['step']} is no number, so there is nothing to compare"
        )
    return value


def _check_steps(a: RunData, in_a: dict[int, dict], b: RunData, in_b: dict[int, dict]) -> None:
    for run, rows, other, others in ((a, in_a, b, in_b), (b, in_b, a, in_a)):
        if missing := sorted(others.keys() - rows.keys()):
            alone = f", or compare --steps {missing[0] - 1} alone" if missing[0] > FEWEST_STEPS else ""
            raise UserError(
                f"{run.folder}: it lacks {run.unit} {spans(missing)}, which {other.folder} has; let it run to its "
                f"end{alone}"
            )


def _over(difference: float, size: float) -> float:
    return difference / size if size else (math.inf if difference else 0.0)


# ---- Differences of two manifests.


MUST_AGREE = {
    "initial_weights": "they begin with different weights",
    "trainable": "they train different parameters",
    "data_order": "they learn from different data, or from the same in another order",
    "seed": "they have different seeds",
    "steps": "they are planned for different numbers of steps, so their learning rates change differently",
}
MAY_DIFFER = {
    "dtype": "precision",
    "device": "device",
    "device_type": "kind of device",
    "threads": "threads",
    "processes": "processes",
    "zero_stage": "ZeRO stage",
    "layout": "layout of the processes",
    "attention_path": "attention",
    "fused_optimiser": "fused optimiser",
    "bf16_fault": "bf16",
}
WITH_A_FINGERPRINT = {"prompt_data", "prompt_data_probs", "prompt_split"}
"""Settings of RL whose effect the order of the data shows, wherever the data lie."""


def _names(*groups: type) -> set[str]:
    return {known.name for group in groups for known in fields(group)}


OF_THE_DEVICE = {
    *(f"{role}_num_{what}" for role in ROLES for what in ("nodes", "gpus_per_node")),
    *(*COLOCATING, "controller_apart", "ref_reward_offload", "deepspeed_enable_sleep", "actor_init_on_gpu"),
    *("vllm_num_engines", "vllm_tensor_parallel_size", "vllm_gpu_memory_utilization", "vllm_enable_sleep"),
    *("vllm_sync_backend", "vllm_sync_with_ray", "vllm_sync_lora", "enforce_eager", "enable_prefix_caching"),
    *("rollout_engine", "rollout_slots", "rollout_kv_tokens", "attn_implementation", "use_liger_kernel"),
    *("micro_rollout_batch_size", "micro_logprob_batch_size", "micro_reward_batch_size", "micro_value_batch_size"),
    *("rollout_max_tokens_per_gpu", "save_rollouts", "async_timeout", *OF_EVALUATION),
    *("env_timeout", "env_workers", "env_threads", "env_memory", "env_retries", "env_max_failed", "env_eval_rows"),
    *("judge_concurrency", "judge_retries", "judge_cache", "judge_key_variable", "max_failed_rewards"),
}
"""Settings that say where and how fast, and what is looked at on the way."""
OF_ANSWERS = _names(RewardSourceOptions, AsyncOptions, EnvironmentOptions) | {
    *(*OF_SAMPLING, *OF_ALL_ANSWERS, "dynamic_filtering_reward_range"),
}
"""Settings without effect on answers that are recorded, rewards and all."""
FILES = "files-"
"""What a fingerprint of weights begins with that was taken from files: it does not depend on the precision."""


@dataclass
class Differences:
    disagreements: list[str] = field(default_factory=list)
    """Why these are not the same training, each in a line."""
    allowed: list[str] = field(default_factory=list)
    """What may differ, and does."""


def differences(a: RunData, b: RunData, *, same_answers: bool) -> Differences:
    """`same_answers`: of RL, that both learn from what one of them recorded."""
    _check(a, b)
    found = Differences()
    for name, told in MUST_AGREE.items():
        if a.manifest.get(name) != b.manifest.get(name):
            shown = f" ({plain(a.manifest.get(name))} and {plain(b.manifest.get(name))})"
            found.disagreements.append(told + (shown if name in ("seed", "steps") else ""))
    if not same_answers and a.manifest.get("reward") != b.manifest.get("reward"):
        found.disagreements.append(
            f"their rewards are {plain(a.manifest.get('reward'))} and {plain(b.manifest.get('reward'))}"
        )
    for name, told in MAY_DIFFER.items():
        if a.manifest.get(name) != b.manifest.get(name):
            found.allowed.append(f"{told}: {_shown(a, name)} and {_shown(b, name)}")
    found.allowed += _versions(a, b)
    for name, told in _settings(a, b):
        free = name in OF_THE_DEVICE or (same_answers and name in OF_ANSWERS)
        (found.allowed if free else found.disagreements).append(told)
    return found


def _check(a: RunData, b: RunData) -> None:
    for run in (a, b):
        if not run.manifest.get("initial_weights"):
            raise UserError(f"{run.folder}: no readable {MANIFEST} there, which says what the run is made of")
        if unsaid := [name for name in MUST_AGREE if run.manifest.get(name) is None]:
            raise UserError(
                f"{run.folder}: its {MANIFEST} does not say {', '.join(unsaid)}, so whether both runs are the same "
                "training cannot be told; train it again with this version"
            )
    weights = {str(run.manifest["initial_weights"]) for run in (a, b)}
    kinds = {known.startswith(FILES) for known in weights}
    precisions = {run.manifest.get("dtype") for run in (a, b)}
    if len(kinds) > 1 or (len(weights) > 1 and kinds == {False} and len(precisions) > 1):
        raise UserError(
            "whether both runs begin with the same weights cannot be told: save the model as safetensors files, and "
            "train both from them"
        )


def _settings(a: RunData, b: RunData) -> Iterator[tuple[str, str]]:
    """Settings in which the runs differ, in words. One that only one run knows counts as its default in the other."""
    first, second = (dict(run.manifest.get("settings") or {}) for run in (a, b))
    missing = object()
    for name in dict.fromkeys([*first, *second]):
        if name in _names(RecordingOptions) | WITH_A_FINGERPRINT:
            continue
        x, y = (known.get(name, defaults_of(run.job).get(name, missing)) for run, known in ((a, first), (b, second)))
        if x != y:
            yield name, f"--{name} is {_setting(x, missing)} and {_setting(y, missing)}"


def _versions(a: RunData, b: RunData) -> Iterator[str]:
    first, second = (dict(run.manifest.get("versions") or {}) for run in (a, b))
    for name in dict.fromkeys([*first, *second]):
        if first.get(name) != second.get(name):
            yield f"{name}: {first.get(name, 'not installed')} and {second.get(name, 'not installed')}"


def _shown(run: RunData, name: str) -> str:
    return plain(run.manifest[name]) if name in run.manifest else "not said"


def _setting(value: Any, missing: object) -> str:
    return "not an option" if value is missing else plain(value)


# ---- The judgement.


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
    a: RunData
    b: RunData
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
    # A floor that decides is printed: a small share of it is not agreement.
    floored = f" ({share(errors.without_floor)} without its floor)" if errors.without_floor != errors.weighted else ""
    return (
        found.words,
        share(errors.weighted) + floored,
        *(share(value) for value in (errors.first, errors.mean_relative)),
        *(short_number(value) for value in (errors.mean_absolute, errors.bias, errors.largest)),
        str(errors.largest_step),
    )


def described(run: RunData) -> str:
    manifest = run.manifest
    made = f"{manifest.get('device', 'an unknown device')}, {manifest.get('dtype', 'unknown precision')}"
    return f"{run.folder}  {job_name(run)}, {plural(run.steps, run.unit)}, {made}"


def share(value: float) -> str:
    """As percents, with digits that show what is small."""
    return (
        percent(value, 1 if value >= 0.1 else 2 if value >= 0.001 else 4) if math.isfinite(value) else "without bound"
    )


def judge(
    a: RunData,
    b: RunData,
    *,
    tolerance: float = TOLERANCE,
    first_tolerance: float | None = None,
    most: int | None = None,
) -> Judgement:
    """`first_tolerance`: instead of the figures' own; `most`: the number of steps to compare, from the first."""
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


def _check_jobs(a: RunData, b: RunData) -> None:
    """One that is asked for by two names, as a preset and with all its options, is one job."""
    same = a.job == b.job
    if a.is_rl and b.is_rl and "tail" not in (a.job, b.job):
        same = same or job_name(a) == job_name(b)
    if not same:
        raise UserError(f"{a.folder} is {job_name(a)} and {b.folder} {job_name(b)}; give two runs of one job")


def _figures(a: RunData, b: RunData, *, same_answers: bool) -> list[Judged]:
    if not a.is_rl:
        return [LOSS]
    # A KL is there only with a reference.
    return [j for j in (REPLAYED if same_answers else SAMPLED) if j is not KL or a.series("kl") or b.series("kl")]


def _learn_from_the_same_answers(a: RunData, b: RunData) -> bool:
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


def _shares_log_probs(a: RunData, b: RunData) -> bool:
    """Whether a replay took the recorded log-probs of the policy, of which the KL is made, for its own. It does where
    it would compute the same ones: in fp32 or --exact, with the built-in engine's whole weights, on one kind of
    device."""
    settings = [run.manifest.get("settings") or {} for run in (a, b)]
    rounded = any(known.get("rollout_engine") == "vllm" or known.get("weight_only_int8") for known in settings)
    kinds = {(run.manifest.get("device_type"), run.manifest.get("dtype")) for run in (a, b)}
    exact = a.manifest.get("dtype") == "float32" or all(run.manifest.get("exact") for run in (a, b))
    return not rounded and len(kinds) == 1 and exact


# ---- The page of `trimtab compare`.


PAGE = "agreement.html"
SIDES = ("A", "B")


def write_judgement(judgement: Judgement, output: str | Path | None = None) -> Path:
    """Write the page and return its path: agreement.html in the second run's folder, or `output`."""
    return write_page(render(judgement), place(output, PAGE, judgement.b.folder))


def render(judgement: Judgement) -> str:
    folders = [judgement.a.folder, judgement.b.folder]
    parts = [section(judgement) for section in (_headline, _reasons, _errors, _curves)]
    return static_page(f"{judgement.verdict}: {folders[0]} and {folders[1]}", parts, folders)


def _headline(judgement: Judgement) -> str:
    entries = "".join(
        f"<li><i class='swatch c{colour}'></i><b>{name}</b> <span>{escape(described(run))}</span></li>"
        for colour, (name, run) in enumerate(zip(SIDES, (judgement.a, judgement.b)))
    )
    return (
        f"<header><p class=eyebrow>{escape(job_name(judgement.a))}</p><h1>{escape(judgement.verdict)}</h1></header>"
        f"<ul class=runs>{entries}</ul>"
    )


def _reasons(judgement: Judgement) -> str:
    told = judgement.complaints or [
        "; ".join(map(_limits, judgement.findings)),
        "initial weights, trained parameters, data and their order, seed and settings are the same",
    ]
    if judgement.same_answers:
        told = [*told, "both learnt from the same recorded answers"]
    entries = "".join(f"<li>{sentence(_capital(words))}.</li>" for words in told)
    allowed = "".join(f"<li>{sentence(_capital(words))}</li>" for words in judgement.differences.allowed)
    reasons = f"<ul class='findings{' calm' if judgement.passes else ''}'>{entries}</ul>"
    return reasons + (f"<h2>Differences that may be</h2><ul class='findings calm'>{allowed}</ul>" if allowed else "")


def _limits(found: Finding) -> str:
    if found.as_recorded:
        return f"{found.words}, which is not judged"
    first = found.judged.first
    own = f", at first within {share(first)}" if first is not None else ""
    return f"{found.judged.words} within {share(found.tolerance)}{own}"


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _errors(judgement: Judgement) -> str:
    return (
        "<h2>Errors</h2><p class=words>B against A. Weighted: the sum of differences over the sum of A's values.</p>"
        + table(HEAD, map(row_of, judgement.findings))
    )


def _curves(judgement: Judgement) -> str:
    drawn = "".join(_charts(found) for found in judgement.findings)
    return f"<h2>Curves and their difference</h2><div class=charts>{drawn}</div>"


def _charts(found: Finding) -> str:
    name = _capital(found.words)
    curves = [
        Line(side, [(spot.step, value) for spot, value in zip(found.places, values)], "only", colour)
        for colour, (side, values) in enumerate(
            zip(SIDES, ([spot.a for spot in found.places], [spot.b for spot in found.places]))
        )
    ]
    apart = [(spot.step, spot.difference) for spot in found.places]
    return chart(name, curves) + chart(f"{name}, B less A", [Line("B less A", apart, "only", 2)], level=0.0)
