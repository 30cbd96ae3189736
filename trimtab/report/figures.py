"""What the numbers of a metrics row mean: their names in words, which picture they share, which way is better.

Every job has a loss; the others come from one job or a few. A number that is not listed here gets a picture too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trimtab.report.read import Run, finite

EVALUATION = "eval_"
MOST_OTHERS = 20


@dataclass(frozen=True)
class Picture:
    """One chart: the metrics drawn in it, each with its name in the legend."""

    title: str
    metrics: dict[str, str]
    note: str = ""
    tall: bool = False
    share: bool = False
    level: float | None = None
    band: bool = False
    """Shade what lies between the two metrics."""
    better: int = 0
    """+1: more is better, -1: less is better, 0: neither."""

    def name_of(self, metric: str) -> str:
        """What a picture of this metric alone is called."""
        return f"{self.metrics[metric]} reward".capitalize() if len(self.metrics) > 1 else self.title


LOSS = Picture("Loss", {"loss": "loss"}, tall=True, better=-1)
REWARDS = {"chosen_reward": "chosen", "rejected_reward": "rejected"}
OBJECTIVES: dict[str, tuple[Picture, ...]] = {
    "rm": (
        Picture("Accuracy", {"accuracy": "accuracy"}, "dashed: chance", share=True, level=0.5, better=1),
        Picture("Mean rewards", REWARDS, band=True),
    ),
    "prm": (Picture("Accuracy", {"accuracy": "accuracy"}, "share of steps judged right", share=True, better=1),),
    "dpo": (
        Picture("Rewards of the two sides", REWARDS, "shaded: the margin", tall=True, level=0.0, band=True),
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
BOOKKEEPING = {"step", "epoch", "samples", "micro_batches", "tokens", "trained_tokens", "skipped_steps", "seconds"}


def objective_pictures(runs: Sequence[Run]) -> list[Picture]:
    """Loss and the figures of these runs' jobs, as far as any run recorded them; each figure in one picture."""
    recorded = {str(name): None for run in runs for row in run.rows for name in row if finite(row[name]) is not None}
    pictures, drawn = [LOSS], {*BOOKKEEPING, *LOSS.metrics, *(name for picture in PACE for name in picture.metrics)}
    others = dict.fromkeys(name.removeprefix(EVALUATION) for name in recorded)
    for picture in (
        *(picture for run in runs for picture in OBJECTIVES.get(run.job, ())),
        EXPERTS,
        *[Picture(_words(name), {name: _words(name)}) for name in others][:MOST_OTHERS],
    ):
        if not drawn.issuperset(picture.metrics) and any(name in others for name in picture.metrics):
            pictures.append(picture)
            drawn.update(picture.metrics)
    return pictures


def _words(name: str) -> str:
    return name.replace("_", " ").strip().capitalize() or "Unnamed"
