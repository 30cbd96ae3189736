"""Panels: which metrics share a chart, what they are called, which way is better.

Every job has a loss; the others come from one job or a few. A metric that is not listed here gets a panel too.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, replace

from trimtab.report.run_data import RunData

EVALUATION = "eval_"
BOUNDS = ("_low", "_high")
"""Of an evaluation's 95 % interval."""


@dataclass(frozen=True)
class Panel:
    """One chart: the metrics drawn in it, each with its name in the legend."""

    title: str
    metrics: dict[str, str]
    note: str = ""
    tall: bool = False
    share: bool = False
    level: float | None = None
    limit: str = ""
    """An option whose value the metrics cannot pass: a dashed line, once they come near it."""
    band: bool = False
    """Shade what lies between the two metrics."""
    better: int = 0
    """+1: more is better, -1: less is better, 0: neither."""
    noun: str = ""
    """What the names in the legend are adjectives of."""

    def name_of(self, metric: str) -> str:
        """What a picture of this metric alone is called."""
        name = self.metrics[metric]
        if len(self.metrics) == 1:
            return self.title
        return f"{name[0].upper()}{name[1:]} {self.noun}" if self.noun else f"{self.title}, {name}"

    def only(self, recorded: Container[str]) -> Panel:
        """With the metrics that were recorded."""
        return replace(self, metrics={metric: name for metric, name in self.metrics.items() if metric in recorded})


# ---- RL.


PASS = re.compile(rf"{EVALUATION}(?:(?P<source>.+)_)?pass_(?P<samples>\d+)")
PART = "reward/"
TWINS = {"score": "reward", "loss": "policy_loss"}
"""Often the same number under two names; then the first one is not drawn."""
ASIDE = {"return", "kl_answer", "kl_loss", "log_prob_ratio", "prompt_tokens", "kl_coefficient", *TWINS}
ASIDE |= {"reward_min", "reward_max", "log_prob", "advantage_size"}
"""What has no picture of its own: others show as much, or it never changes."""

REWARD = Panel("Reward", {"reward": "reward", "score": "score"}, "means", better=1, noun="of the answers")
TAIL = (
    Panel("Exact probability of a bad word", {"log_bad_probability": "log P(bad)"}, "nats", tall=True, better=-1),
    Panel("Worst reward", {"worst_reward": "policy", "proposal_worst_reward": "proposal"}, "of an iteration"),
    Panel("Bad answers", {"bad_share": "policy", "proposal_bad_share": "proposal"}, share=True, noun="bad answers"),
    Panel("Reward of the proposal", {"proposal_reward": "reward"}, "below the policy's, if it finds bad answers"),
    Panel("Effective samples of a group", {"proposal_effective_samples": "samples"}, "of the proposal's answers"),
)
FIGURES = (
    Panel("KL to the reference", {"kl": "KL"}, "nats a token"),
    Panel("Entropy", {"sampled_entropy": "sampled", "entropy": "exact"}, "nats a token", noun="entropy"),
    Panel(
        "Clip fraction",
        {"clip_fraction": "policy", "critic_clip_fraction": "critic"},
        "share of the tokens",
        share=True,
        noun="clip fraction",
    ),
    Panel("Answer length", {"length": "mean", "length_max": "longest"}, "tokens", limit="generate_max_len"),
    Panel("Explained variance", {"explained_variance": "explained variance"}, "1: returns are foreseen", better=1),
    Panel("Spread of the rewards", {"reward_std": "standard deviation"}, "standard deviation"),
    Panel("Groups without a difference", {"equal_groups": "groups"}, "all rewards are equal", share=True),
    Panel("Answers cut at the limit", {"truncated": "answers"}, share=True, better=-1),
    Panel("Groups left out by filtering", {"filtered_groups": "groups"}),
    Panel("Penalty of long answers", {"overlong_penalty": "penalty"}, better=-1),
    Panel("Movement in an iteration", {"policy_kl": "KL"}, "KL to the policy that sampled"),
    Panel(
        "Sampled against trained",
        {"log_prob_gap": "all tokens", "log_prob_gap_fresh": "tokens of the weights themselves"},
        "mean difference of log-probs",
    ),
    Panel("Policy loss", {"policy_loss": "surrogate", "loss": "whole"}, noun="policy loss"),
    Panel("Critic loss", {"critic_loss": "critic loss"}, better=-1),
)
FINISH = "finish/"
ENDS = {"stop": "over", "truncated": "cut off by it", "turns": "no turns left", "context": "no room left"}
"""How an episode can end, in words; the rest are their own."""
EPISODES = (
    Panel("Turns of an episode", {"turns": "mean"}, "of the model", limit="max_turns"),
    Panel("Episode length", {"episode_length": "mean"}, "tokens, the world's among them", limit="episode_max_len"),
    Panel(
        "Tools",
        {"tool_calls": "calls", "tool_failures": "failed", "unknown_tools": "unknown"},
        "an episode",
        noun="tool calls",
    ),
    Panel("Samples without a drawn token", {"empty_samples": "samples"}, "in no group", better=-1),
    Panel("Episodes that failed", {"failed_episodes": "episodes"}, "their groups are left out", better=-1),
    Panel("Sequences of an episode", {"branches": "mean"}, "more than 1: its history was rewritten"),
    Panel(
        "Time in the environment",
        {"seconds_environment": "mean", "seconds_environment_95": "95 % are below"},
        "seconds a step",
    ),
)
"""Of environments."""
OUTLIVING = (
    Panel(
        "Age of what is trained",
        {"age": "mean", "age_max": "largest"},
        "updates since a group was begun",
        limit="async_staleness",
    ),
    Panel("Trainer with nothing to do", {"waiting": "waiting"}, "share of the time", share=True, better=-1),
    Panel("Engines at work", {"engine_busy": "engines"}, "share of the time", share=True, better=1),
    Panel("Groups under way", {"under_way": "groups"}, "begun and not trained"),
    Panel("Tokens read again", {"read_again": "tokens"}, "of unfinished answers, by the new weights"),
    Panel("Corrected tokens", {"corrected_share": "tokens"}, "weight off 1 by more than a tenth", share=True),
)
"""Of answers that outlive an update."""
KL_WEIGHT = Panel("Weight of the KL", {"kl_coefficient": "weight"})
RL_PACE = (
    Panel("Learning rate", {"learning_rate": "policy", "critic_learning_rate": "critic"}, noun="learning rate"),
    Panel("Gradient norm", {"grad_norm": "policy", "critic_grad_norm": "critic"}, noun="gradient norm"),
    Panel(
        "Tokens a second",
        {
            "rollout_tokens_per_second": "rollout",
            "update_tokens_per_second": "update",
            "tokens_per_second": "iteration",
        },
        noun="tokens a second",
    ),
    Panel("Memory", {"memory_gib": "memory"}, "GiB"),
)


def rl_panels(runs: Sequence[RunData]) -> Iterator[Panel]:
    """The pictures of those of these runs that are RL, the most telling first."""
    runs = [run for run in runs if run.is_rl]
    names = list(dict.fromkeys(name for run in runs for name in run.metrics))
    twins = {name for name, other in TWINS.items() if not any(_differ(run, name, other) for run in runs)}
    recorded = {name.removeprefix(EVALUATION) for name in names} - twins
    yield from success_panels(runs, names)
    yield REWARD.only(recorded)
    # The only part of a reward is the reward.
    parts = [name for name in names if name.startswith(PART) and any(_differ(run, name, "reward") for run in runs)]
    yield Panel("Parts of the reward", {name: name.removeprefix(PART) or name for name in parts})
    for picture in (*TAIL, *FIGURES, *EPISODES, *OUTLIVING):
        # The limit of answers is one of turns, where an answer is an episode.
        plays = "turns" in recorded and picture.limit == "generate_max_len"
        yield replace(picture.only(recorded), limit="" if plays else picture.limit)
    ends = [name for name in names if name.startswith(FINISH)]
    yield Panel("How episodes end", {name: _end(name) for name in ends}, share=True)
    if any(len({value for _, value in run.series("kl_coefficient")}) > 1 for run in runs):
        yield KL_WEIGHT


def success_panels(runs: Sequence[RunData], names: Sequence[str]) -> Iterator[Panel]:
    """Success over all prompts, then by data source: of one answer, and of the best of several."""
    binary = all(is_binary(run) for run in runs)
    title = f"{min(run.held_out for run in runs) if runs else ''} {'success' if binary else 'score'}".capitalize()
    found = [match for name in names if (match := PASS.fullmatch(name))]
    numbers = sorted({int(match["samples"]) for match in found})
    yield Panel(
        title,
        {f"pass_{n}": best_of(n) for n in numbers if f"{EVALUATION}pass_{n}" in names},
        tall=True,
        share=binary,
        better=1,
    )
    sources = dict.fromkeys(match["source"] for match in found if match["source"])
    for n in numbers:
        yield Panel(
            f"{title} by source, {best_of(n)}",
            {f"{source}_pass_{n}": source for source in sources if f"{EVALUATION}{source}_pass_{n}" in names},
            share=binary,
            better=1,
        )


def _end(name: str) -> str:
    end = name.removeprefix(FINISH)
    return ENDS.get(end, end)


def is_binary(run: RunData) -> bool:
    """Whether every score of every evaluation was 0 or 1: then, and only then, their mean is a rate of success."""
    return all(row.get("eval_binary") is True for row in run.rows if f"{EVALUATION}pass_1" in row)


def _differ(run: RunData, name: str, other: str) -> bool:
    return bool(run.series(name)) and run.series(name) != run.series(other)


def best_of(samples: int) -> str:
    return "one answer" if samples == 1 else f"best of {samples} answers"


# ---- Every job.


MOST_OTHERS = 20

LOSS = Panel("Loss", {"loss": "loss"}, tall=True, better=-1)
REWARDS = {"chosen_reward": "chosen", "rejected_reward": "rejected"}
OBJECTIVES: dict[str, tuple[Panel, ...]] = {
    "rm": (
        Panel("Accuracy", {"accuracy": "accuracy"}, "dashed: chance", share=True, level=0.5, better=1),
        Panel("Mean rewards", REWARDS, band=True, noun="reward"),
    ),
    "prm": (Panel("Accuracy", {"accuracy": "accuracy"}, "share of steps judged right", share=True, better=1),),
    "dpo": (
        Panel(
            "Rewards of the two sides", REWARDS, "shaded: the margin", tall=True, level=0.0, band=True, noun="reward"
        ),
        Panel("Reward margin", {"reward_margin": "margin"}, "chosen minus rejected", better=1),
        Panel("Accuracy", {"accuracy": "accuracy"}, "share of pairs with a positive margin", share=True, better=1),
        Panel("NLL of the chosen answer", {"nll": "NLL"}, better=-1),
    ),
    "kto": (
        Panel(
            "Rewards of the two sides",
            {"chosen_reward": "desirable", "rejected_reward": "undesirable"},
            "shaded: the margin",
            tall=True,
            level=0.0,
            band=True,
            noun="reward",
        ),
        Panel("Reward margin", {"reward_margin": "margin"}, "desirable minus undesirable", better=1),
        Panel("KL estimate", {"kl": "KL"}, "what a reward is measured against"),
    ),
    "kd": (
        Panel("NLL of the data", {"nll": "NLL"}, better=-1),
        Panel("Distance to the teacher", {"distance": "distance"}, better=-1),
    ),
}
EXPERTS = Panel("Balance of the experts", {"aux_loss": "auxiliary loss"}, "1: evenly used")
PACE = (
    Panel("Learning rate", {"learning_rate": "learning rate"}),
    Panel("Gradient norm", {"grad_norm": "gradient norm"}, "before clipping"),
    Panel("Tokens a second", {"tokens_per_second": "tokens a second"}),
    Panel("Memory", {"memory_gib": "memory"}, "GiB"),
)
BOOKKEEPING = {"step", "epoch", "samples", "micro_batches", "tokens", "trained_tokens", "skipped_steps"}


def pace_panels(runs: Sequence[RunData]) -> list[Panel]:
    """Speed, memory and the optimiser."""
    if not any(run.is_rl for run in runs):
        return list(PACE)
    recorded = _recorded(runs)
    return [picture.only(recorded) for picture in RL_PACE]


def objective_panels(runs: Sequence[RunData]) -> list[Panel]:
    """Loss and the figures of these runs' jobs, as far as any run recorded them; each figure in one picture.

    The loss of RL says little, so there it is one of the later figures.
    """
    recorded = _recorded(runs)
    pictures = [] if all(run.is_rl for run in runs) else [LOSS]
    drawn = {*BOOKKEEPING, *(name for picture in (LOSS, *pace_panels(runs)) for name in picture.metrics)}
    aside = ASIDE if any(run.is_rl for run in runs) else ()
    bounds = {f"{name}{end}" for name in recorded for end in BOUNDS}
    others = [name for name in recorded if name not in aside and name not in bounds]
    others = [name for name in others if not name.startswith(("seconds", PART))]
    for picture in (
        *(picture for run in runs for picture in OBJECTIVES.get(run.job, ())),
        *rl_panels(runs),
        EXPERTS,
        *(Panel(_words(name), {name: _words(name)}) for name in others[:MOST_OTHERS]),
    ):
        if not drawn.issuperset(picture.metrics) and any(name in recorded for name in picture.metrics):
            pictures.append(picture)
            drawn.update(picture.metrics)
    return pictures


def _recorded(runs: Sequence[RunData]) -> dict[str, None]:
    """Names of the metrics, whether they are of training or of evaluation."""
    return dict.fromkeys(name.removeprefix(EVALUATION) for run in runs for name in run.metrics)


def _words(name: str) -> str:
    return name.replace("_", " ").strip().capitalize() or "Unnamed"
