"""What deserves a second look in a run, in words: the alarms of the run itself, and what only its end shows.

What only some jobs can get wrong is in objective_findings.py and rl_findings.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from trimtab.report.numbers import percent, plain, spans
from trimtab.report.objective_findings import RULES as OBJECTIVE_RULES
from trimtab.report.read import Run, finite
from trimtab.report.rl_findings import RULES as RL_RULES

ENOUGH_STEPS = 20
"""Below this many steps a trend is noise."""
MOST_ALARMS = 20
FIGURE = re.compile(r"-?\d[\d.,]*(e[-+]?\d+)?")


def findings(run: Run) -> list[str]:
    """Sentences about the run, the gravest first; empty when nothing is unusual."""
    return [*_progress(run), *warnings(run), *run.problems]


def warnings(run: Run) -> list[str]:
    """The same without how far the run is, and without what could not be read."""
    rules = (_skipped, _alarms, *RL_RULES, _loss_trend, *OBJECTIVE_RULES, _overlap, _data)
    return [sentence for rule in rules for sentence in rule(run)]


def _progress(run: Run) -> Iterator[str]:
    planned = finite(run.manifest.get("steps"))
    # Filtering uses up prompts, so such a run may come to its end sooner than planned.
    if run.options.get("dynamic_filtering") is True and run.has_saved_model:
        planned = None
    if not run.steps:
        yield "No iteration is finished yet." if run.is_rl else "No optimiser step is recorded yet."
    elif planned is not None and run.rows[-1]["step"] < planned:
        yield (
            f"{run.unit.capitalize()} {run.rows[-1]['step']} of {planned:.0f} is the last one recorded: still going, "
            "or stopped early."
        )
    elif not run.has_saved_model:
        yield "There is no saved model in this folder: the run is still going, or it was stopped before its end."


def _skipped(run: Run) -> Iterator[str]:
    skipped = int(max((value for _, value in run.series("skipped_steps")), default=0))
    if skipped:
        was = "step was" if skipped == 1 else "steps were"
        yield (
            f"{skipped} optimiser {was} skipped because the loss or a gradient was not finite. "
            "A lower learning rate or a look at those rows may help."
        )


def alarms(run: Run) -> list[str]:
    """What the run itself told while it worked."""
    return list(_alarms(run))


def _alarms(run: Run) -> Iterator[str]:
    """Each kind of alarm once, with the steps at which it held."""
    steps: dict[str, list[int]] = {}
    latest: dict[str, str] = {}
    for row in run.rows:
        listed = row.get("alarms")
        for text in listed if isinstance(listed, list) else ():
            if isinstance(text, str) and text.strip():
                # The same alarm has other figures at every step.
                kind = FIGURE.sub("0", text)
                latest[kind] = text.strip()
                steps.setdefault(kind, []).append(row["step"])
    for kind, held in list(steps.items())[:MOST_ALARMS]:
        text = latest[kind]
        noun = run.unit if len(held) == 1 else f"{run.unit}s"
        as_of = f"; the figures are those of {held[-1]}" if len(held) > 1 and FIGURE.search(text) else ""
        told = text[0].upper() + text[1:].removesuffix(".")
        yield f"{told} ({noun} {spans(held)}, {len(held)} of {run.steps}{as_of})."


def _loss_trend(run: Run) -> Iterator[str]:
    ends = run.ends("loss")
    # A policy loss is about zero by construction, whatever is learnt.
    if ends is None or len(run.series("loss")) < ENOUGH_STEPS or run.is_rl:
        return
    first, last = ends
    if abs(last - first) < 0.02 * abs(first):
        yield (
            f"The loss hardly moved ({first:.3g} to {last:.3g}): the learning rate may be too low, "
            "or the model already knows these data."
        )


def _overlap(run: Run) -> Iterator[str]:
    evaluation = run.data.get("evaluation")
    if run.held_out == "held-out" or not isinstance(evaluation, dict):
        return
    seen, of = plain(evaluation["rows_also_trained"]), plain(evaluation.get("rows_kept"))
    yield f"{seen} of {of} {run.noun} of the evaluation have a prompt that is trained on too: it is not held out."


def _data(run: Run) -> Iterator[str]:
    read, kept, truncated, over_long, empty, equal = (
        finite(run.data.get(f"rows_{name}")) or 0.0
        for name in ("read", "kept", "truncated", "over_long", "empty", "equal")
    )
    longest = "--prompt_max_len" if run.is_rl else "--max_len"
    if kept and truncated / kept > 0.1:
        share = percent(truncated / kept, 0)
        yield f"{share} of the {run.noun} were cut to the longest allowed length: consider a larger {longest}."
    if read and over_long / read > 0.1:
        share = percent(over_long / read, 0)
        yield f"{share} of the {run.noun} were left out as too long: consider a larger {longest}."
    if read and empty / read > 0.1:
        share = percent(empty / read, 0)
        yield f"{share} of the {run.noun} were left out because there is nothing to learn in them."
    if kept and equal / kept > 0.05:
        share = percent(equal / kept, 0)
        yield f"In {share} of the pairs chosen and rejected are the same: nothing can be learnt from them."
