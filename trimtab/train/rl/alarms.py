"""What looks wrong in an iteration, in words: shown while the run works, and in its report."""

from collections.abc import Iterator

MUCH_KL = 1.0  # nats a token: the policy no longer resembles the reference
LITTLE_ENTROPY = 0.1  # of what it was in the first iteration
NEARLY_ALL = 0.9  # of the way from the worst reward to the best: sure of itself, and right to be
MANY_TRUNCATED = 0.5
MUCH_GAP = 0.05  # nats, mean over tokens
RATIO_OFF = 0.02
MANY_CORRECTED = 0.2  # of the tokens
MANY_FAILURES = 0.5  # of the tool calls
MANY_CUT_OFF = 0.5  # of the episodes
MANY_EMPTY = 0.5  # of the samples
OLD_IN_A_ROW = 3  # iterations whose oldest answers were as old as may be


def alarms(row: dict, first_entropy: float, at_bound: int = 0) -> Iterator[str]:
    """`first_entropy`: the first iteration's entropy, in nats a token; `at_bound`: in how many iterations in a row the
    oldest answers were as old as may be."""
    taught = "teacher_kl" in row  # a teacher rewards every token, whatever the answers are worth
    if row["reward_std"] == 0 and not taught:
        yield "all rewards are equal: there is nothing to learn from; look at the reward and at a few answers"
    elif row["equal_groups"] == 1 and not taught:
        yield "in every group all rewards are equal: no answer is better than its neighbours; vary prompts or sampling"
    if row.get("kl", 0.0) > MUCH_KL:
        yield f"KL to the reference is {row['kl']:.2f} nats a token: raise --init_kl_coef or lower the learning rate"
    solved = row["reward"] >= row["reward_min"] + NEARLY_ALL * (row["reward_max"] - row["reward_min"])
    if first_entropy > 0 and row["sampled_entropy"] < LITTLE_ENTROPY * first_entropy and not solved:
        yield (
            f"entropy has fallen to {row['sampled_entropy']:.3f} from {first_entropy:.3f} nats a token: all answers "
            "become alike; try --entropy_loss_coef or a higher --temperature"
        )
    if (cut := row.get("finish/length", row["truncated"])) > MANY_TRUNCATED:
        yield f"{cut:.0%} of the answers end at --generate_max_len: raise it, or reward shorter ones"
    gap, ratio = row.get("log_prob_gap", 0.0), row.get("log_prob_ratio", 1.0)
    older = "age" in row  # than the policy that learns from it: then a gap is expected, but of what that policy drew
    if (fresh := row.get("log_prob_gap_fresh", 0.0)) > MUCH_GAP:
        yield (
            f"sampled and trained log-probs of the same weights drift apart (mean difference {fresh:.3f} nats): the "
            "weights that write are not those that are trained"
        )
    elif not older and (gap > MUCH_GAP or abs(ratio - 1) > RATIO_OFF):
        yield (
            f"sampled and trained log-probs drift apart (mean difference {gap:.3f} nats, mean ratio {ratio:.3f}): "
            "what is sampled is not what is trained"
        )
    elif (corrected := row.get("corrected_share", 0.0)) > MANY_CORRECTED:
        why = "answers are old for a policy that moves so fast; lower --async_staleness or the learning rate"
        yield (
            f"{corrected:.0%} of the tokens are weighed by a tenth or more: "
            f"{why if older else 'what is sampled is not what is trained'}"
        )
    yield from _of_episodes(row)
    if at_bound >= OLD_IN_A_ROW:
        yield (
            f"in {at_bound} iterations running the oldest answers were {row['age_max']:.0f} iterations old, the most "
            "that --async_staleness allows: learning waits for them; raise it, or look at what makes them slow"
        )


def _of_episodes(row: dict) -> Iterator[str]:
    if (empty := row.get("empty_samples", 0)) > MANY_EMPTY * row.get("samples", 0):
        yield (
            f"{empty:.0f} of {row['samples']} samples have no token that the model drew: they teach nothing; look at "
            "what ends them before the first turn"
        )
    if failed := row.get("failed_episodes", 0):
        yield f"{failed:.0f} episodes failed, retries and all, and their groups are left out: look at the environment"
    calls, failures = row.get("tool_calls", 0.0), row.get("tool_failures", 0.0)
    if calls and failures > MANY_FAILURES * calls:
        yield f"{failures / calls:.0%} of the tool calls failed: look at a few episodes and at what the tools expect"
    cut_off = {"turns": "--max_turns", "context": "--episode_max_len"}
    for end, option in cut_off.items():
        if (share := row.get(f"finish/{end}", 0.0)) > MANY_CUT_OFF:
            yield f"{share:.0%} of the episodes end at {option}: raise it, or reward shorter ones"
