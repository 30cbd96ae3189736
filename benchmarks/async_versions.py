"""Weights that arrive while answers are being written: what every token carries, and how far it is from the policy that
trains on it, before and after truncated importance weights.

A small Llama with random weights learns to answer in digits (REINFORCE with the group's mean as baseline, AdamW) while
an engine in the same process writes its answers. After every few tokens the oldest finished groups are trained on, and
the new weights arrive in flight: abort, hand over, ask again for prompt + prefix. Nothing waits for an answer's end, so
an answer is drawn by several versions of the weights. Of every trained token it is worked out exactly, over the whole
vocabulary, how far apart are the distribution that it was drawn from (its version's) and the policy at the update:

gap       |log-prob as it was drawn - log-prob of the policy now|, of the drawn tokens
apart     total variation between the two distributions: what an uncorrected update averages over, against the policy
          "weighed": the same with every probability times min(now / then, 2), as --mismatch_correction tis has it
kept      what keeping the keys and values of earlier weights would do to the tokens after a change: |log-prob with keys
          and values as each version left them - log-prob of the version alone|. It is not offered.

How large the figures are depends on the learning rate and the task; how they relate does not.

python benchmarks/async_versions.py [vllm | builtin]      with TORCHDYNAMO_DISABLE=1 vLLM starts a minute sooner
"""

import sys
import tempfile
import time
from collections import deque
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch

from trimtab.algos.policy_losses import NOTICEABLE, mismatch_weights
from trimtab.data.batches import TokenBatch
from trimtab.embedded.sort_task import CHARACTERS, SPECIAL_TOKENS, make_model, make_tokenizer
from trimtab.models.policy import Policy
from trimtab.models.selfcheck import choose_path
from trimtab.models.weight_export import WeightExport
from trimtab.rollout.engine import Engine, Session
from trimtab.rollout.factory import build_engine, build_vllm_engine
from trimtab.rollout.sampling import SamplingParams
from trimtab.rollout.trajectory import Trajectory

GROUPS, ANSWERS, BATCH = 24, 4, 6  # under way at once; to a prompt; groups an update trains on, at most
UPDATES, TOKENS_BETWEEN, LONGEST = 40, 6, 48
LEARNING_RATE = 3e-4
RANGE = (0.0, 2.0)  # of the weights
DIGITS = [len(SPECIAL_TOKENS) + CHARACTERS.index(digit) for digit in "0123456789"]


@dataclass
class Group:
    prompt: list[int]
    seed: int
    limit: int
    trajectories: list[Trajectory]

    @property
    def open(self) -> list[Trajectory]:
        return [draft for draft in self.trajectories if draft.finish is None]


def main() -> None:
    kind = sys.argv[1] if len(sys.argv) > 1 else "vllm"
    if kind == "vllm" and find_spec("vllm") is None:
        return print("vLLM is not installed: nothing is measured; give builtin for the engine on the trainer's weights")
    torch.manual_seed(0)
    policy = Policy(make_model())
    choose_path(policy)
    with tempfile.TemporaryDirectory() as folder:
        engine = build(kind, Path(folder), policy)
        try:
            measure(kind, engine, policy)
        finally:
            engine.close()


def build(kind: str, folder: Path, policy: Policy) -> Engine:
    if kind == "builtin":
        return build_engine(policy, max_num_seqs=GROUPS * ANSWERS)
    policy.model.save_pretrained(folder)
    weights = WeightExport(policy, bf16=False)
    return build_vllm_engine(
        str(folder), make_tokenizer(), weights, eager=True, max_num_seqs=GROUPS * ANSWERS, longest=128
    )


def measure(kind: str, engine: Engine, policy: Policy) -> None:
    numbers = np.random.default_rng(0)
    optimiser = torch.optim.AdamW(policy.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    sampling = SamplingParams(max_new_tokens=LONGEST, n=ANSWERS)
    under_way, finished = [], deque[Group]()
    weights, tables, arrivals, rewards = [as_it_is(policy)], [], [], []
    again = drawn = 0
    for update in range(UPDATES):
        while len(under_way) < GROUPS:
            under_way.append(new_group(numbers))
        again += sum(len(draft.ids) for group in under_way for draft in group.open)
        drawn -= sum(len(draft.ids) for group in under_way for draft in group.trajectories)
        begin = time.perf_counter()
        with engine.session(sampling) as session:
            write(session, under_way)
        drawn += sum(len(draft.ids) for group in under_way for draft in group.trajectories)
        finished += [group for group in under_way if not group.open]
        under_way = [group for group in under_way if group.open]
        writing = time.perf_counter() - begin
        if batch := [finished.popleft() for _ in range(min(BATCH, len(finished)))]:
            tables.append(looked_at(batch, weights, update))
            rewards.append(learn(policy, optimiser, batch))
        begin = time.perf_counter()
        engine.weights_changed(update + 1)
        arrivals.append((writing, time.perf_counter() - begin))
        weights.append(as_it_is(policy))
    told(kind, np.concatenate(tables), arrivals, rewards, drawn, again)


def as_it_is(policy: Policy) -> torch.nn.Module:
    model = make_model()
    model.load_state_dict(policy.model.state_dict())
    return model


def new_group(numbers: np.random.Generator) -> Group:
    prompt = numbers.integers(len(SPECIAL_TOKENS), len(SPECIAL_TOKENS) + len(CHARACTERS), 8).tolist()
    limit = int(numbers.integers(8, LONGEST + 1))
    return Group(prompt, int(numbers.integers(2**62)), limit, [Trajectory.empty(k) for k in range(ANSWERS)])


def write(session: Session, groups: list[Group]) -> None:
    """A few tokens for every answer; then all are set down as they are."""
    asked = {session.add(g.prompt, seed=g.seed, limit=g.limit, partials=g.open): g for g in groups}
    found: list[Trajectory] = []
    # All answers to a prompt are equally long: the first one is there while the others are.
    while (
        session.has_unfinished
        and max(len(session.output_ids(n)) - len(g.trajectories[0].ids) for n, g in asked.items()) < TOKENS_BETWEEN
    ):
        found += session.step(TOKENS_BETWEEN)
    session.abort()
    found += list(session)
    for rollout in found:
        asked[rollout.prompt].trajectories[rollout.sample] = rollout.stored()


def learn(policy: Policy, optimiser: torch.optim.Optimizer, groups: list[Group]) -> float:
    """One step on these groups, weighed; their mean reward: the share of digits."""
    examples, advantages, drawn, means = [], [], [], []
    for group in groups:
        rewards = np.array([np.isin(draft.ids, DIGITS).mean() for draft in group.trajectories])
        means.append(rewards.mean())
        for draft, advantage in zip(group.trajectories, (rewards - rewards.mean()) / (rewards.std() + 1e-6)):
            ids = np.array(group.prompt + draft.ids)
            examples.append((ids, np.arange(len(ids)) >= len(group.prompt)))
            advantages += [advantage] * len(draft.ids)
            drawn.append(draft.log_probs)
    batch = TokenBatch.of(examples)
    now_N, then_N = policy(batch).log_probs_N, torch.from_numpy(np.concatenate(drawn))
    weights_N = mismatch_weights("tis", now_N, then_N, batch.owners_N, len(examples), *RANGE)
    loss = -(weights_N * torch.tensor(advantages, dtype=torch.float32) * now_N).mean()
    optimiser.zero_grad()
    loss.backward()
    optimiser.step()
    return float(np.mean(means))


# ---- figures

COLUMNS = ("age", "gap", "weight", "apart", "weighed", "own", "kept")


@torch.no_grad()
def looked_at(groups: list[Group], weights: list[torch.nn.Module], now: int) -> np.ndarray:
    """A row of COLUMNS for every token of a batch."""
    rows = []
    for group in groups:
        for draft in group.trajectories:
            ids, first = torch.tensor([group.prompt + draft.ids]), len(group.prompt) - 1
            versions, places = torch.from_numpy(draft.versions), torch.arange(len(draft.ids))
            by_version = {v: shares(weights[v](ids).logits[0, first:-1]) for v in {*draft.versions.tolist(), now}}
            then_NV = torch.stack([by_version[v][n] for n, v in enumerate(draft.versions.tolist())])
            now_NV, sampled_N = by_version[now], torch.from_numpy(draft.log_probs)
            picked = places, torch.tensor(draft.ids)
            gap_N, own_N = now_NV[picked] - sampled_N, then_NV[picked] - sampled_N
            then_NV, now_NV = then_NV.exp(), now_NV.exp()
            kept_N = with_kept_keys(ids, versions, weights, first)[picked] - then_NV[picked].log()
            values = [now - versions, gap_N.abs(), gap_N.exp().clamp(*RANGE), apart(then_NV, now_NV)]
            values += [apart(torch.minimum(now_NV, RANGE[1] * then_NV), now_NV), own_N.abs(), kept_N.abs()]
            rows.append(torch.stack([v.double() for v in values], 1).numpy())
    return np.concatenate(rows)


def shares(logits_NV: torch.Tensor) -> torch.Tensor:
    return logits_NV.double().log_softmax(-1)


def apart(one_NV: torch.Tensor, other_NV: torch.Tensor) -> torch.Tensor:
    return (one_NV - other_NV).abs().sum(-1) / 2


def with_kept_keys(
    ids: torch.Tensor, versions_N: torch.Tensor, weights: list[torch.nn.Module], first: int
) -> torch.Tensor:
    """Log-probs where every version goes on from the keys and values that the ones before it have left."""
    cache, found, done = None, [], 0
    for version in versions_N.unique().tolist():
        end = first + int((versions_N <= version).sum())
        out = weights[version](ids[:, done:end], past_key_values=cache, use_cache=True)
        cache, done = out.past_key_values, end
        found.append(out.logits[0])
    return shares(torch.cat(found)[first:])


def told(kind: str, rows: np.ndarray, arrivals: list, rewards: list[float], drawn: int, again: int) -> None:
    age, gap, weight, before, after, own, kept = rows.T
    print(
        f"engine {kind}: {UPDATES} updates, {len(rows):,} trained tokens; reward {rewards[0]:.2f} to {rewards[-1]:.2f}"
    )
    print(f"its own gap, to the weights that drew a token: mean {own.mean():.1e}, largest {own.max():.1e}")
    print(f"{'age':>5} {'tokens':>7} {'gap mean':>9} {'largest':>8} {'apart':>7} {'weighed':>8} {'weights off 1':>20}")
    for low, high in ((0, 0), (1, 1), (2, 2), (3, 4), (5, 8), (9, 99), (0, 99)):
        if not (mask := (age >= low) & (age <= high)).any():
            continue
        name = (
            "all"
            if (low, high) == (0, 99)
            else str(low)
            if low == high
            else f"{low}+"
            if high == 99
            else f"{low}-{high}"
        )
        off = np.abs(weight[mask] - 1) > NOTICEABLE
        figures = f"{gap[mask].mean():9.4f} {gap[mask].max():8.3f} {before[mask].mean():7.4f} {after[mask].mean():8.4f}"
        print(f"{name:>5} {mask.sum():>7,} {figures} {off.mean():>19.1%}")
    moved = kept > 1e-5
    print(f"kept keys and values: {moved.mean():.0%} of tokens off their version, by {kept[moved].mean():.4f}, "
          f"largest {kept.max():.3f}")  # fmt: skip
    seconds = np.array(arrivals)[2:].mean(0)
    print(f"a change of weights: {seconds[1] * 1e3:.0f} ms to arrive, beside {seconds[0] * 1e3:.0f} ms of writing; "
          f"{again / drawn:.1f} tokens of partial rollouts read again for each one drawn")  # fmt: skip


if __name__ == "__main__":
    main()
