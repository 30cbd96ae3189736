"""Which runs belong into a figure: a YAML or JSON file that names them, method by method and seed by seed.

    info: ./info                      folder of the metric files (what --save_info_path was)
    checkpoints: ./ckpt               folder in which attacks left gcg_eval_*.jsonl
    threshold: -5                     rewards below it are bad
    level: 0.0001                     of CVaR
    methods:
      - label: RePULSe, beta -10      shown in the legend
        run: rlhf_..._s{seed}         name of a run; {seed} stands for each of
        seeds: [1, 2, 3]
        family: RePULSe               points of one family are joined; unset: the label
        samples: 250000               sequences sampled in the whole run, for the axis of curves

A run that is named and has no file is a mistake and told as one: nothing is left out silently.
"""

import io
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from trimtab.errors import UserError
from trimtab.evaluate.tail_risk import (
    ANALYTIC,
    HELD_OUT,
    Estimate,
    HeldOut,
    Replies,
    bootstrap_mean,
    cvar,
    probability_below,
    read_analytic,
    read_held_out,
    share,
    t_intervals,
)
from trimtab.report.formatting import short_number, table
from trimtab.report.page import static_page, write_page

TOP = {"info": str, "checkpoints": str, "threshold": (int, float), "level": (int, float), "methods": list}
OF_A_METHOD = {"label": str, "run": str, "seeds": list, "family": str, "samples": int}


@dataclass(frozen=True)
class Method:
    label: str
    run: str
    seeds: tuple[int, ...]
    family: str
    samples: int | None

    def names(self) -> list[str]:
        """The name of each seed's run."""
        return [self.run.replace("{seed}", str(seed)) for seed in self.seeds]


@dataclass(frozen=True)
class Manifest:
    path: Path
    methods: list[Method]
    info: Path
    checkpoints: Path
    threshold: float | None
    level: float | None

    def __post_init__(self):
        if self.level is not None and not 0 < self.level <= 1:
            raise UserError(
                f"{self.path}: level is {self.level:g}; it is a share of the rewards, above 0 and at most 1"
            )


def read_manifest(path: str | Path) -> Manifest:
    """Folders in it are seen from where it lies."""
    path = Path(path).expanduser()
    content = _checked(_content(path), TOP, str(path))
    entries = content.get("methods")
    if not entries:
        raise UserError(f"{path}: methods is missing or empty; list the runs of each method there")
    methods = [_method(entry, f"{path} method {number}") for number, entry in enumerate(entries, start=1)]
    labels = [method.label for method in methods]
    if twice := next((label for label in labels if labels.count(label) > 1), None):
        raise UserError(f"{path}: two methods are called {twice!r}; give each its own label")
    info, checkpoints = (path.parent / Path(content.get(name, ".")).expanduser() for name in ("info", "checkpoints"))
    return Manifest(path, methods, info, checkpoints, content.get("threshold"), content.get("level"))


def _content(path: Path) -> Any:
    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))  # JSON is YAML
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; give the manifest of a figure") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not valid YAML or JSON: {' '.join(str(error).split())[:150]}") from None


def _checked(content: Any, known: dict[str, Any], where: str) -> dict[str, Any]:
    if not isinstance(content, dict):
        raise UserError(f"{where}: names and values are needed ({', '.join(known)})")
    for name, value in content.items():
        if name not in known:
            raise UserError(f"{where}: unknown name {name}; known are {', '.join(known)}")
        if not isinstance(value, known[name]) or isinstance(value, bool):
            raise UserError(f"{where}: {name} has the value {value!r}, which is of the wrong kind")
    return content


def _method(entry: Any, where: str) -> Method:
    entry = _checked(entry, OF_A_METHOD, where)
    for name in ("label", "run", "seeds"):
        if not entry.get(name):
            raise UserError(f"{where}: {name} is missing")
    seeds = entry["seeds"]
    if not all(isinstance(seed, int) for seed in seeds) or len(set(seeds)) < len(seeds):
        raise UserError(f"{where}: seeds are different whole numbers, such as [1, 2, 3]")
    if len(seeds) > 1 and "{seed}" not in entry["run"]:
        raise UserError(
            f"{where}: run names one run for {len(seeds)} seeds; write {{seed}} where the seed stands in it"
        )
    label = entry["label"]
    return Method(label, entry["run"], tuple(seeds), entry.get("family", label), entry.get("samples"))


# ---- Outcomes of each method over its seeds.


CURVES = {"log_bad": "log P(bad)", "rewards": "mean reward", "returns": "mean return"}
"""What the measurements of a run hold, and what it is called."""
ATTACKED = ("_harml_actor", "_actor", "")  # what a run's checkpoint has after its name


@dataclass(frozen=True)
class TrainingCurve:
    label: str
    x: np.ndarray
    centre: np.ndarray
    margin: np.ndarray
    seeds: int


@dataclass(frozen=True)
class FrontierPoint:
    label: str
    family: str
    x: Estimate
    y: Estimate
    seeds: int


def curves(manifest: Manifest, what: str) -> list[TrainingCurve]:
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
        found.append(TrainingCurve(method.label, places, centre, margin, len(values)))
    return found


def points(manifest: Manifest, x: str, y: str) -> list[FrontierPoint]:
    """A point a method."""
    return [
        FrontierPoint(
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


def families(found: list[FrontierPoint]) -> dict[str, list[FrontierPoint]]:
    """Points of a family by ascending x."""
    groups: dict[str, list[FrontierPoint]] = {}
    for point in found:
        groups.setdefault(point.family, []).append(point)
    return {name: sorted(members, key=lambda point: point.x.value) for name, members in groups.items()}


# ---- Figures by matplotlib.


# Okabe and Ito's colours, told apart by readers of any colour vision; markers tell them apart in print too.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999")
MARKERS = "osD^vP*X"
GRID = "#DDDDDD"
FORMATS = (".png", ".svg", ".pdf")
DECADE = 10  # probabilities that are further apart stand on a logarithmic axis
NAMES = {
    "reward": "mean reward",
    "return": "mean return (reward less weighted KL)",
    "kl": "KL from the start, nats a token",
    "bad": "P(reward < {threshold:g})",
    "cvar": "CVaR: mean of the worst {percent:.3g} % of rewards",
    "gcg": "attack success: targets with a reply below {threshold:g}",
}


def curves_figure(manifest: Manifest, kinds: Iterable[str] = CURVES) -> Any:
    """The kinds of measurement that the runs have, side by side."""
    found = {what: lines for what in kinds if (lines := curves(manifest, what))}
    if not found:
        raise UserError(f"{manifest.path}: the files of its runs hold no measurements")
    figure, axes = _figure(len(found))
    colours = {method.label: COLOURS[i % len(COLOURS)] for i, method in enumerate(manifest.methods)}
    for panel, (what, lines) in zip(axes, found.items()):
        for line in lines:
            colour = colours[line.label]
            label = f"{line.label} ({_seeds(line.seeds)})"
            panel.plot(line.x, line.centre, color=colour, label=label, linewidth=1.6)
            if line.seeds > 1:
                band = (line.centre - line.margin, line.centre + line.margin)
                panel.fill_between(line.x, *band, color=colour, alpha=0.2, linewidth=0)
        counted = all(method.samples is not None for method in manifest.methods)
        panel.set_xlabel("sequences sampled" if counted else "measurement")
        panel.set_ylabel(CURVES[what])
        panel.locator_params(axis="x", nbins=5)
        panel.ticklabel_format(axis="x", style="sci", scilimits=(-3, 4), useMathText=True)
    axes[0].legend(frameon=False, fontsize=8)
    return figure


def frontier_figure(manifest: Manifest, x: str, y: str) -> Any:
    """A marker a method with its intervals; a dashed line joins a family."""
    figure, (panel,) = _figure(1)
    found = points(manifest, x, y)
    for style, members in enumerate(families(found).values()):
        colour = COLOURS[style % len(COLOURS)]
        if len(members) > 1:
            line = ([point.x.value for point in members], [point.y.value for point in members])
            panel.plot(*line, color=colour, linestyle="--", linewidth=1, alpha=0.7)
        for number, point in enumerate(members):
            _mark(panel, point, colour, MARKERS[(style + number) % len(MARKERS)])
    panel.set_xlabel(name_of(x, manifest))
    panel.set_ylabel(name_of(y, manifest))
    if y == "bad" and span([point.y.value for point in found]) >= DECADE:
        panel.set_yscale("log")
    else:
        panel.ticklabel_format(axis="y", style="sci", scilimits=(-3, 4), useMathText=True)
    panel.legend(frameon=False, fontsize=8)
    return figure


def span(values: list[float]) -> float:
    """The largest over the smallest; 0 where one is not above 0, so that they have no logarithm."""
    return max(values) / min(values) if min(values) > 0 else 0.0


def name_of(what: str, manifest: Manifest) -> str:
    """What a figure is called on an axis."""
    percent = None if manifest.level is None else 100 * manifest.level
    return NAMES[what].format(threshold=manifest.threshold, percent=percent)


def save(figure: Any, output: Path) -> Path:
    if output.suffix not in FORMATS:
        raise UserError(f"--output {output}: figures are {', '.join(FORMATS)}; give a file that ends so")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(output, dpi=200, metadata={"Date": None} if output.suffix == ".svg" else None)
    except OSError as error:
        raise UserError(f"--output {output}: cannot write there ({error.strerror})") from error
    return output


def inline(figure: Any) -> str:
    """The figure as an SVG element of a page, in the colours of the page: what is black is its ink."""
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None}, transparent=True)
    _, _, drawing = text.getvalue().partition("<svg")
    drawing = drawing.replace("#000000", "currentColor").replace(GRID.lower(), "var(--rule)")
    return f'<svg style="width: 100%; height: auto; fill: currentColor"{drawing}'


def _mark(panel: Any, point: FrontierPoint, colour: str, marker: str) -> None:
    bars = {f"{axis}err": [[e.value - e.low], [e.high - e.value]] for axis, e in (("x", point.x), ("y", point.y))}
    panel.errorbar(
        point.x.value,
        point.y.value,
        **(bars if point.seeds > 1 else {}),
        color=colour,
        marker=marker,
        linestyle="none",
        markersize=6,
        elinewidth=1,
        capsize=2,
        label=f"{point.label} ({_seeds(point.seeds)})",
    )


def _seeds(count: int) -> str:
    return "1 seed" if count == 1 else f"{count} seeds"


def _figure(panels: int) -> tuple[Any, list[Any]]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.4 * panels + 0.6, 3.8), layout="constrained")
    axes = list(figure.subplots(1, panels, squeeze=False)[0])
    for panel in axes:
        panel.grid(True, color=GRID, linewidth=0.6)
        panel.set_axisbelow(True)
        panel.spines[["top", "right"]].set_visible(False)
    return figure, axes


# ---- The page of an experiment.


COLUMNS = ("reward", "return", "bad", "cvar", "gcg")


def write_experiment(manifest: Manifest, output: Path) -> Path:
    """What cannot be shown, because its files or its threshold are not there, is said instead."""
    columns: dict[str, list[Estimate]] = {}
    absent: list[str] = []
    for what in COLUMNS:
        if what == "gcg" and not was_attacked(manifest):
            continue
        try:
            columns[what] = [point_of(manifest, method, what) for method in manifest.methods]
        except UserError as error:
            absent.append(str(error))
    pictures = []
    for draw in (
        *(lambda kind=kind: curves_figure(manifest, [kind]) for kind in _kinds(manifest, absent)),
        *(lambda y=y: frontier_figure(manifest, "return", y) for y in ("bad", "cvar", "gcg") if y in columns),
    ):
        try:
            pictures.append(f"<figure class=chart>{inline(draw())}</figure>")
        except UserError as error:
            absent.append(str(error))
    if not columns and not pictures:
        raise UserError(absent[0])
    title = manifest.path.stem
    notes = "".join(f"<li>Not shown: {escape(told)}</li>" for told in dict.fromkeys(absent))
    body = [
        f"<header><p class=eyebrow>experiment</p><h1>{escape(title)}</h1></header>",
        f"<ul class=findings>{notes}</ul>" if notes else "",
        _table(manifest, columns) if columns else "",
        f"<h2>Figures</h2><div class=charts>{''.join(pictures)}</div>" if pictures else "",
    ]
    return write_page(static_page(title, body, [manifest.path.parent]), output)


def _kinds(manifest: Manifest, absent: list[str]) -> list[str]:
    try:
        return measured(manifest)
    except UserError as error:
        absent.append(str(error))
        return []


def _table(manifest: Manifest, columns: dict[str, list[Estimate]]) -> str:
    rows = [
        (method.label, str(len(method.seeds)), *(_cell(values[number]) for values in columns.values()))
        for number, method in enumerate(manifest.methods)
    ]
    told = "Means over seeds; in brackets 95 % of the means of resampled seeds, which is too narrow for two or three. "
    told += "Where nothing was counted, or everything, the interval is Wilson's over the samples of all seeds."
    head = ("method", "seeds", *(name_of(what, manifest) for what in columns))
    return f"<h2>Outcomes</h2><p class=words>{told}</p>{table(head, rows)}"


def _cell(found: Estimate) -> str:
    if found.low == found.high:
        return short_number(found.value)
    return f"{short_number(found.value)} ({short_number(found.low)} to {short_number(found.high)})"
