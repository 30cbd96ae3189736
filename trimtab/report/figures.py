"""What the numbers of a metrics row mean: their names in words, which picture they share, which way is better.

Every job has a loss; the others come from one job or a few. A number that is not listed here gets a picture too.
"""

from __future__ import annotations

from collections.abc import Sequence

from trimtab.report import rl_figures
from trimtab.report.picture import BOUNDS, EVALUATION, Picture
from trimtab.report.read import Run

MOST_OTHERS = 20

LOSS = Picture("Loss", {"loss": "loss"}, tall=True, better=-1)
REWARDS = {"chosen_reward": "chosen", "rejected_reward": "rejected"}
OBJECTIVES: dict[str, tuple[Picture, ...]] = {
    "rm": (
        Picture("Accuracy", {"accuracy": "accuracy"}, "dashed: chance", share=True, level=0.5, better=1),
        Picture("Mean rewards", REWARDS, band=True, noun="reward"),
    ),
    "prm": (Picture("Accuracy", {"accuracy": "accuracy"}, "share of steps judged right", share=True, better=1),),
    "dpo": (
        Picture(
            "Rewards of the two sides", REWARDS, "shaded: the margin", tall=True, level=0.0, band=True, noun="reward"
        ),
        Picture("Reward margin", {"reward_margin": "margin"}, "chosen minus rejected", better=1),
        Picture("Accuracy", {"accuracy": "accuracy"}, "share of pairs with a positive margin", share=True, better=1),
        Picture("NLL of the chosen answer", {"nll": "NLL"}, better=-1),
    ),
    "kto": (
        Picture(
            "Rewards of the two sides",
            {"chosen_reward": "desirable", "rejected_reward": "undesirable"},
            "shaded: the margin",
            tall=True,
            level=0.0,
            band=True,
            noun="reward",
        ),
        Picture("Reward margin", {"reward_margin": "margin"}, "desirable minus undesirable", better=1),
        Picture("KL estimate", {"kl": "KL"}, "what a reward is measured against"),
    ),
    "kd": (
        Picture("NLL of the data", {"nll": "NLL"}, better=-1),
        Picture("Distance to the teacher", {"distance": "distance"}, better=-1),
    ),
}
EXPERTS = Picture("Balance of the experts", {"aux_loss": "auxiliary loss"}, "1: evenly used")
PACE = (
    Picture("Learning rate", {"learning_rate": "learning rate"}),
    Picture("Gradient norm", {"grad_norm": "gradient norm"}, "before clipping"),
    Picture("Tokens a second", {"tokens_per_second": "tokens a second"}),
    Picture("Memory", {"memory_gib": "memory"}, "GiB"),
)
BOOKKEEPING = {"step", "epoch", "samples", "micro_batches", "tokens", "trained_tokens", "skipped_steps"}


def pace_pictures(runs: Sequence[Run]) -> list[Picture]:
    """Speed, memory and the optimiser."""
    if not any(run.is_rl for run in runs):
        return list(PACE)
    recorded = _recorded(runs)
    return [picture.only(recorded) for picture in rl_figures.PACE]


def objective_pictures(runs: Sequence[Run]) -> list[Picture]:
    """Loss and the figures of these runs' jobs, as far as any run recorded them; each figure in one picture.

    The loss of RL says little, so there it is one of the later figures.
    """
    recorded = _recorded(runs)
    pictures = [] if all(run.is_rl for run in runs) else [LOSS]
    drawn = {*BOOKKEEPING, *(name for picture in (LOSS, *pace_pictures(runs)) for name in picture.metrics)}
    aside = rl_figures.ASIDE if any(run.is_rl for run in runs) else ()
    bounds = {f"{name}{end}" for name in recorded for end in BOUNDS}
    others = [name for name in recorded if name not in aside and name not in bounds]
    others = [name for name in others if not name.startswith(("seconds", rl_figures.PART))]
    for picture in (
        *(picture for run in runs for picture in OBJECTIVES.get(run.job, ())),
        *rl_figures.rl_pictures(runs),
        EXPERTS,
        *(Picture(_words(name), {name: _words(name)}) for name in others[:MOST_OTHERS]),
    ):
        if not drawn.issuperset(picture.metrics) and any(name in recorded for name in picture.metrics):
            pictures.append(picture)
            drawn.update(picture.metrics)
    return pictures


def _recorded(runs: Sequence[Run]) -> dict[str, None]:
    """Names of the metrics, whether they are of training or of evaluation."""
    return dict.fromkeys(name.removeprefix(EVALUATION) for run in runs for name in run.metrics)


def _words(name: str) -> str:
    return name.replace("_", " ").strip().capitalize() or "Unnamed"
