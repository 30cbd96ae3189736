"""The pictures of an RL run. Which of them there are depends on the estimator, the reward and the evaluation."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

from trimtab.report.picture import EVALUATION, Picture
from trimtab.report.read import Run

PASS = re.compile(rf"{EVALUATION}(?:(?P<source>.+)_)?pass_(?P<samples>\d+)")
PART = "reward/"
TWINS = {"score": "reward", "loss": "policy_loss"}
"""Often the same number under two names; then the first one is not drawn."""
ASIDE = {"return", "kl_answer", "kl_loss", "log_prob_ratio", "prompt_tokens", "kl_coefficient", *TWINS}
ASIDE |= {"reward_min", "reward_max", "log_prob", "advantage_size"}
"""What has no picture of its own: others show as much, or it never changes."""

REWARD = Picture("Reward", {"reward": "reward", "score": "score"}, "means", better=1, noun="of the answers")
TAIL = (
    Picture("Exact probability of a bad word", {"log_bad_probability": "log P(bad)"}, "nats", tall=True, better=-1),
    Picture("Worst reward", {"worst_reward": "policy", "proposal_worst_reward": "proposal"}, "of an iteration"),
    Picture("Bad answers", {"bad_share": "policy", "proposal_bad_share": "proposal"}, share=True, noun="bad answers"),
    Picture("Reward of the proposal", {"proposal_reward": "reward"}, "below the policy's, if it finds bad answers"),
    Picture("Effective samples of a group", {"proposal_effective_samples": "samples"}, "of the proposal's answers"),
)
FIGURES = (
    Picture("KL to the reference", {"kl": "KL"}, "nats a token"),
    Picture("Entropy", {"sampled_entropy": "sampled", "entropy": "exact"}, "nats a token", noun="entropy"),
    Picture(
        "Clip fraction",
        {"clip_fraction": "policy", "critic_clip_fraction": "critic"},
        "share of the tokens",
        share=True,
        noun="clip fraction",
    ),
    Picture("Answer length", {"length": "mean", "length_max": "longest"}, "tokens", limit="generate_max_len"),
    Picture("Explained variance", {"explained_variance": "explained variance"}, "1: returns are foreseen", better=1),
    Picture("Spread of the rewards", {"reward_std": "standard deviation"}, "standard deviation"),
    Picture("Groups without a difference", {"equal_groups": "groups"}, "all rewards are equal", share=True),
    Picture("Answers cut at the limit", {"truncated": "answers"}, share=True, better=-1),
    Picture("Groups left out by filtering", {"filtered_groups": "groups"}),
    Picture("Penalty of long answers", {"overlong_penalty": "penalty"}, better=-1),
    Picture("Movement in an iteration", {"policy_kl": "KL"}, "KL to the policy that sampled"),
    Picture(
        "Sampled against trained",
        {"log_prob_gap": "all tokens", "log_prob_gap_fresh": "tokens of the weights themselves"},
        "mean difference of log-probs",
    ),
    Picture("Policy loss", {"policy_loss": "surrogate", "loss": "whole"}, noun="policy loss"),
    Picture("Critic loss", {"critic_loss": "critic loss"}, better=-1),
)
FINISH = "finish/"
ENDS = {"stop": "over", "truncated": "cut off by it", "turns": "no turns left", "context": "no room left"}
"""How an episode can end, in words; the rest are their own."""
EPISODES = (
    Picture("Turns of an episode", {"turns": "mean"}, "of the model", limit="max_turns"),
    Picture("Episode length", {"episode_length": "mean"}, "tokens, the world's among them", limit="episode_max_len"),
    Picture(
        "Tools",
        {"tool_calls": "calls", "tool_failures": "failed", "unknown_tools": "unknown"},
        "an episode",
        noun="tool calls",
    ),
    Picture("Samples without a drawn token", {"empty_samples": "samples"}, "in no group", better=-1),
    Picture("Episodes that failed", {"failed_episodes": "episodes"}, "their groups are left out", better=-1),
    Picture("Sequences of an episode", {"branches": "mean"}, "more than 1: its history was rewritten"),
    Picture(
        "Time in the environment",
        {"seconds_environment": "mean", "seconds_environment_95": "95 % are below"},
        "seconds a step",
    ),
)
"""Of environments."""
OUTLIVING = (
    Picture(
        "Age of what is trained",
        {"age": "mean", "age_max": "largest"},
        "updates since a group was begun",
        limit="async_staleness",
    ),
    Picture("Trainer with nothing to do", {"waiting": "waiting"}, "share of the time", share=True, better=-1),
    Picture("Engines at work", {"engine_busy": "engines"}, "share of the time", share=True, better=1),
    Picture("Groups under way", {"under_way": "groups"}, "begun and not trained"),
    Picture("Tokens read again", {"read_again": "tokens"}, "of unfinished answers, by the new weights"),
    Picture("Corrected tokens", {"corrected_share": "tokens"}, "weight off 1 by more than a tenth", share=True),
)
"""Of answers that outlive an update."""
KL_WEIGHT = Picture("Weight of the KL", {"kl_coefficient": "weight"})
PACE = (
    Picture("Learning rate", {"learning_rate": "policy", "critic_learning_rate": "critic"}, noun="learning rate"),
    Picture("Gradient norm", {"grad_norm": "policy", "critic_grad_norm": "critic"}, noun="gradient norm"),
    Picture(
        "Tokens a second",
        {
            "rollout_tokens_per_second": "rollout",
            "update_tokens_per_second": "update",
            "tokens_per_second": "iteration",
        },
        noun="tokens a second",
    ),
    Picture("Memory", {"memory_gib": "memory"}, "GiB"),
)


def rl_pictures(runs: Sequence[Run]) -> Iterator[Picture]:
    """The pictures of those of these runs that are RL, the most telling first."""
    runs = [run for run in runs if run.is_rl]
    names = list(dict.fromkeys(name for run in runs for name in run.metrics))
    twins = {name for name, other in TWINS.items() if not any(_differ(run, name, other) for run in runs)}
    recorded = {name.removeprefix(EVALUATION) for name in names} - twins
    yield from success_pictures(runs, names)
    yield REWARD.only(recorded)
    # The only part of a reward is the reward.
    parts = [name for name in names if name.startswith(PART) and any(_differ(run, name, "reward") for run in runs)]
    yield Picture("Parts of the reward", {name: name.removeprefix(PART) or name for name in parts})
    for picture in (*TAIL, *FIGURES, *EPISODES, *OUTLIVING):
        # The limit of answers is one of turns, where an answer is an episode.
        plays = "turns" in recorded and picture.limit == "generate_max_len"
        yield replace(picture.only(recorded), limit="" if plays else picture.limit)
    ends = [name for name in names if name.startswith(FINISH)]
    yield Picture("How episodes end", {name: _end(name) for name in ends}, share=True)
    if any(len({value for _, value in run.series("kl_coefficient")}) > 1 for run in runs):
        yield KL_WEIGHT


def success_pictures(runs: Sequence[Run], names: Sequence[str]) -> Iterator[Picture]:
    """Success over all prompts, then by data source: of one answer, and of the best of several."""
    binary = all(is_binary(run) for run in runs)
    title = f"{min(run.held_out for run in runs) if runs else ''} {'success' if binary else 'score'}".capitalize()
    found = [match for name in names if (match := PASS.fullmatch(name))]
    numbers = sorted({int(match["samples"]) for match in found})
    yield Picture(
        title,
        {f"pass_{n}": best_of(n) for n in numbers if f"{EVALUATION}pass_{n}" in names},
        tall=True,
        share=binary,
        better=1,
    )
    sources = dict.fromkeys(match["source"] for match in found if match["source"])
    for n in numbers:
        yield Picture(
            f"{title} by source, {best_of(n)}",
            {f"{source}_pass_{n}": source for source in sources if f"{EVALUATION}{source}_pass_{n}" in names},
            share=binary,
            better=1,
        )


def _end(name: str) -> str:
    end = name.removeprefix(FINISH)
    return ENDS.get(end, end)


def is_binary(run: Run) -> bool:
    """Whether every score of every evaluation was 0 or 1: then, and only then, their mean is a rate of success."""
    return all(row.get("eval_binary") is True for row in run.rows if f"{EVALUATION}pass_1" in row)


def _differ(run: Run, name: str, other: str) -> bool:
    return bool(run.series(name)) and run.series(name) != run.series(other)


def best_of(samples: int) -> str:
    return "one answer" if samples == 1 else f"best of {samples} answers"
