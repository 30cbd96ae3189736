"""The numbers behind the figures: what each method's runs came to, over their seeds."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from trimtab.errors import UserError
from trimtab.evaluate.attack.success import Replies
from trimtab.evaluate.seeds import bootstrap_mean, t_intervals
from trimtab.evaluate.tail_files import ANALYTIC, HELD_OUT, HeldOut, read_analytic, read_held_out
from trimtab.evaluate.tail_risk import Estimate, cvar, probability_below, share
from trimtab.report.manifest import Manifest, Method

CURVES = {"log_bad": "log P(bad)", "rewards": "mean reward", "returns": "mean return"}
"""What the measurements of a run hold, and what it is called."""
ATTACKED = ("_harml_actor", "_actor", "")  # what a run's checkpoint has after its name


@dataclass(frozen=True)
class Curve:
    label: str
    x: np.ndarray
    centre: np.ndarray
    margin: np.ndarray
    seeds: int


@dataclass(frozen=True)
class Point:
    label: str
    family: str
    x: Estimate
    y: Estimate
    seeds: int


def curves(manifest: Manifest, what: str) -> list[Curve]:
    """A curve a method; one whose files hold nothing of this kind (the original has no returns of PPO) is left out."""
    found = []
    for method in manifest.methods:
        values = [getattr(read_analytic(manifest.info / f"{ANALYTIC}{name}"), what) for name in method.names()]
        lengths = {len(series) for series in values}
        if len(lengths) > 1:
            raise UserError(
                f"{manifest.path}: the seeds of {method.label!r} have {sorted(lengths)} measurements; plot runs that "
                "were measured alike"
            )
        if lengths == {0}:
            continue
        centre, margin = t_intervals(np.array(values))
        places = np.arange(len(centre)) if method.samples is None else np.linspace(0, method.samples, len(centre))
        found.append(Curve(method.label, places, centre, margin, len(values)))
    return found


def points(manifest: Manifest, x: str, y: str) -> list[Point]:
    """A point a method."""
    return [
        Point(
            method.label,
            method.family,
            point_of(manifest, method, x),
            point_of(manifest, method, y),
            len(method.seeds),
        )
        for method in manifest.methods
    ]


def point_of(manifest: Manifest, method: Method, what: str) -> Estimate:
    """A figure of a method: the mean over its seeds."""
    figure = _measure(what, manifest)
    found = [figure(name) for name in method.names()]
    estimate = bootstrap_mean([one.value for one in found])
    counted = [one for one in found if isinstance(one, Share)]
    if counted and estimate.value in (0.0, 1.0):
        # No seed differs from another, which does not make their share certain.
        samples = sum(one.of for one in counted)
        return share(estimate.value * samples, samples)
    return estimate


def was_attacked(manifest: Manifest) -> bool:
    """Whether anybody looked for suffixes that break one of these runs."""
    names = [name for method in manifest.methods for name in method.names()]
    return any(place.exists() for name in names for place in _attacks(manifest, name))


def measured(manifest: Manifest) -> list[str]:
    """The kinds of measurement that the runs have."""
    return [what for what in CURVES if curves(manifest, what)]


@dataclass(frozen=True)
class Figure:
    value: float


@dataclass(frozen=True)
class Share(Figure):
    of: int
    """Samples that were counted."""


def _measure(what: str, manifest: Manifest) -> Callable[[str], Figure]:
    """From the name of a run to its figure."""
    if what in ("bad", "gcg") and manifest.threshold is None:
        raise UserError(f"--y {what} needs --threshold, or threshold in {manifest.path}: the reward below which is bad")
    if what == "cvar" and manifest.level is None:
        raise UserError(f"--y cvar needs --level, or level in {manifest.path}: a share above 0 and at most 1")

    threshold, level = manifest.threshold or 0.0, manifest.level or 0.0  # unset: of figures that are not asked for

    def held_out(name: str) -> HeldOut:
        return read_held_out(manifest.info / f"{HELD_OUT}{name}")

    return {
        "reward": lambda name: Figure(float(held_out(name).rewards.mean())),
        "return": lambda name: Figure(float(held_out(name).returns.mean())),
        "kl": lambda name: Figure(float(held_out(name).token_kl.mean())),
        "bad": lambda name: _below(held_out(name).rewards, threshold),
        "cvar": lambda name: Figure(cvar(held_out(name).rewards, level, draws=1).value),
        "gcg": lambda name: attack_success(_attack_of(manifest, name), threshold),
    }[what]


def _below(rewards: np.ndarray, threshold: float) -> Share:
    return Share(probability_below(rewards, threshold).value, len(rewards))


def _attacks(manifest: Manifest, name: str) -> list[Path]:
    return [manifest.checkpoints / f"gcg_eval_{name}{ending}.jsonl" for ending in ATTACKED]


def _attack_of(manifest: Manifest, name: str) -> Path:
    places = _attacks(manifest, name)
    found = next((place for place in places if place.exists()), None)
    if found is None:
        raise UserError(f"{places[0]}: no such file; attack the run with trimtab attack, or correct {manifest.path}")
    return found


def attack_success(path: Path, threshold: float) -> Share:
    """The share of targets with a reply below the threshold."""
    try:
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        replies = [Replies(**row["after"]) for row in rows]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}: cannot be read as the findings of an attack ({type(error).__name__})") from error
    if not replies or any(one.rewards is None for one in replies):
        raise UserError(f"{path}: holds no rewards; attack with --reward_pretrain")
    return Share(sum(one.successes("reward", threshold) > 0 for one in replies) / len(replies), len(replies))


def families(found: list[Point]) -> dict[str, list[Point]]:
    """Points of a family by ascending x."""
    groups: dict[str, list[Point]] = {}
    for point in found:
        groups.setdefault(point.family, []).append(point)
    return {name: sorted(members, key=lambda point: point.x.value) for name, members in groups.items()}
