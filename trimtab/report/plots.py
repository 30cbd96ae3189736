"""Figures for papers and slides, by matplotlib: training curves over seeds, and frontiers. PNG, SVG or PDF."""

import io
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from trimtab.errors import UserError
from trimtab.report.manifest import Manifest
from trimtab.report.outcomes import CURVES, Point, curves, families, points

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


def _mark(panel: Any, point: Point, colour: str, marker: str) -> None:
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
