"""What the loop is handed while groups are written ahead: by processes that are made up, so that all may happen."""

import json
import random

import pytest
import torch

from tests.train.rl.scripted_client import FakeClient, Process, SeveralWorkers
from trimtab.config.rl_jobs import GRPOOptions
from trimtab.errors import UserError
from trimtab.interrupts import StopRequest
from trimtab.rewards.types import RewardFailed
from trimtab.rollout.sampling import SamplingParams
from trimtab.train.rl.async_client import RolloutStalled
from trimtab.train.rl.async_source import AsyncSource
from trimtab.train.rl.source import prompt_order

PROMPTS = 23
APART = {"ray": True, "rollout_engine": "vllm", "vllm_num_engines": 3}


class Run:
    """A loop that trains nothing; what it says it has done is its ledger."""

    def __init__(self, seed: int, *, processes: int = 1, **changes):
        draw = random.Random(seed)
        fixed = {"rollout_batch_size": 3, "n_samples_per_prompt": 2, "async_train": True, "num_episodes": 2}
        fixed |= {"async_queue_size": 1, "async_staleness": draw.randint(1, 4), "seed": seed}
        self.options = GRPOOptions(**fixed | changes)
        self.order = prompt_order(PROMPTS, self.options, self.options.num_episodes)
        self.iteration, self.used, self.lines = 0, 0, []
        self.begin(seed, processes)

    def begin(self, seed: int, processes: int) -> None:
        """Anew, in other processes."""
        self.members = [Process(seed * 10 + rank) for rank in range(processes)]
        self.group = SeveralWorkers(self.members)
        client = FakeClient(self.group)
        steps = -(-self.order.steps // self.options.rollout_batch_size)
        self.source = AsyncSource(self.options, self.order, SamplingParams(n=2), client, steps)
        client.replace_engine = self.mend

    def mend(self, lost) -> None:
        self.group.mend()
        for member in self.group.members:
            member.version = self.source.ledger.iteration
        self.source.engine_replaced()

    def iterate(self) -> bool:
        sampled = self.source.next(self.iteration, self.used, StopRequest())
        assert sampled is not None
        experience, prompts, self.figures = sampled
        if experience is not None:
            self.check(experience)
        self.trained(prompts)
        return experience is not None and self.used < self.order.steps

    def finish(self, first: int = 0) -> None:
        """Iterate to the end; each place from this one on is settled once."""
        while self.iterate():
            pass
        assert self.settled() == list(range(first, self.order.steps))

    def check(self, experience) -> None:
        assert experience.versions_N is not None
        ages = self.iteration - experience.versions_N
        assert int(ages.min()) >= 0 and int(ages.max()) <= self.options.async_staleness
        assert torch.equal(experience.rewards_S, experience.logs["reward"])

    def trained(self, prompts: int) -> None:
        with self.source.paused():
            for member in self.group.members:
                assert not member.writing, "weights change while nobody writes"
                member.version = self.iteration + 1
        self.source.trained()
        self.lines.append(self.source.settled())
        self.iteration, self.used = self.iteration + 1, self.used + prompts

    def saved(self) -> tuple:
        tensors, state = self.source.state(in_hand=False)
        kept = {name: tensor.clone() for name, tensor in tensors.items()}
        return kept, json.dumps(state), self.iteration, self.used, list(self.lines)

    def killed(self, checkpoint: tuple, seed: int, processes: int) -> None:
        tensors, state, self.iteration, self.used, lines = checkpoint
        self.lines = list(lines)
        self.begin(seed, processes)
        for member in self.members:
            member.version = self.iteration
        self.source.restore(tensors, json.loads(state))

    def settled(self) -> list[int]:
        return sorted(place for line in self.lines for place in [*line["trained"], *line["filtered"]])


@pytest.mark.parametrize("seed", range(25))
def test_every_prompt_is_trained_or_filtered_once_over_random_kills_and_numbers_of_processes(seed):
    draw = random.Random(seed)
    filtering = {"dynamic_filtering": True, "dynamic_filtering_rule": "differing"} if draw.random() < 0.5 else {}
    run = Run(seed, processes=draw.randint(1, 3), **filtering)
    checkpoint = run.saved()
    while run.iterate():
        if draw.random() < 0.4:
            checkpoint = run.saved()
        if draw.random() < 0.3:
            run.killed(checkpoint, seed + 1, draw.randint(1, 3))
    assert run.settled() == list(range(run.order.steps))
    for iteration, line in enumerate(run.lines):
        assert all(0 <= iteration - version <= run.options.async_staleness for version in line["versions"])
    if filtering:  # the answers to a prompt of a row 3 k + 1 are rewarded alike
        useful = {place for place in range(run.order.steps) if run.order.step_samples(place)[0] % 3 != 1}
        assert {place for line in run.lines for place in line["trained"]} == useful
    assert not run.source.scored and not run.source.ledger.versions


def test_what_is_written_survives_a_checkpoint_token_by_token():
    run = Run(3, async_queue_size=2, async_staleness=4)
    run.iterate()
    before = {group.place: group for group in run.members[0].unfinished()}
    judged = dict(run.source.scored)
    assert before and any(len(group.trajectories[0].ids) for group in before.values())
    run.killed(run.saved(), seed=9, processes=2)
    after = {group.place: group for member in run.members for group in member.unfinished()}
    assert after.keys() == before.keys() and run.source.scored.keys() == judged.keys()
    for place, group in before.items():
        assert (group.row, group.seed, group.version) == (after[place].row, after[place].seed, after[place].version)
        for old, new in zip(group.trajectories, after[place].trajectories, strict=True):
            assert old.ids == new.ids and (old.sample, old.finish) == (new.sample, new.finish)
            assert (old.versions == new.versions).all() and (old.log_probs == new.log_probs).all()


def test_a_batch_that_nothing_was_learnt_from_is_handed_out_again():
    run = Run(4)
    experience, prompts, _ = run.source.next(0, 0, StopRequest())
    assert run.source.settled() is not None, "to ask is not to say that it is trained"
    again, more, _ = run.source.next(0, 0, StopRequest())
    assert torch.equal(experience.ids_T, again.ids_T) and prompts == more
    tensors, state = run.source.state(in_hand=False)
    run.killed((tensors, json.dumps(state), 0, 0, []), seed=4, processes=1)
    resumed, _, _ = run.source.next(0, 0, StopRequest())
    assert torch.equal(resumed.rows_S, experience.rows_S)
    run.source.trained()
    run.lines = [run.source.settled()]
    run.iteration, run.used = 1, prompts
    run.finish()


def test_a_batch_in_hand_is_the_loops_and_not_put_back():
    run = Run(4)
    experience, prompts, _ = run.source.next(0, 0, StopRequest())
    tensors, state = run.source.state(in_hand=True)
    run.killed((tensors, json.dumps(state), 0, 0, []), seed=4, processes=1)
    run.trained(prompts)
    assert run.lines[0]["trained"] and len(run.lines[0]["trained"]) == experience.groups
    run.finish()


@pytest.mark.parametrize("method", ["collect", "pause", "admit", "resume", "unfinished"])
def test_when_an_engine_is_lost_its_groups_are_written_by_the_next(method):
    run = Run(5, processes=3, **APART)
    run.iterate()
    run.group.lost[method] = 1
    while run.iterate():
        run.saved()
    assert not run.group.lost and not run.group.gone, "it was lost, and replaced"
    assert run.settled() == list(range(run.order.steps))


@pytest.mark.parametrize("method", ["collect", "pause"])
def test_an_engine_that_is_lost_while_another_is_late_is_replaced_once(method):
    run = Run(5, processes=3, **APART)
    run.iterate()
    for _ in range(3):
        if method == "collect":
            run.group.late[method], run.group.lost["collect"] = 0, 1
        _, prompts, _ = run.source.next(run.iteration, run.used, StopRequest())
        if method == "pause":
            run.group.late[method], run.group.lost["collect"] = 0, 1
        run.trained(prompts)
    assert not run.group.lost and not run.group.late
    assert run.group.mended == 3
    run.finish()


def test_when_everything_is_built_anew_everything_is_given_out_again():
    run = Run(6, processes=2)
    run.iterate()
    run.group.members[:] = [Process(77), Process(78)]
    for member in run.group.members:
        member.version = run.iteration
    run.source.rebuilt()
    run.finish()


def test_a_failed_reward_loses_nothing_and_says_whose_it_is():
    run = Run(7, processes=2)
    for member in run.members:
        member.failing = {1}
    with pytest.raises(RewardFailed, match=r"the reward broke; its prompt stands in line \d+"):
        run.finish()
    run.killed(run.saved(), seed=8, processes=1)
    run.finish()


def test_a_run_in_which_nothing_moves_ends_with_a_table_of_who_waits_for_what(capsys):
    run = Run(8, async_timeout=0.01)
    run.iterate()
    run.members[0].stuck = True
    with pytest.raises(
        RolloutStalled, match=r"no token, no reward and no step for 0.01 s \(--async_timeout\); \d+ answers"
    ):
        run.finish()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["prompt", "answer", "tokens", "seconds", "waits", "for"]
    assert all(line.endswith("1.5  its next token") for line in lines[1:]) and len(lines) > 1


def test_a_synchronous_run_goes_on_as_an_asynchronous_one():
    run = Run(9)
    run.iteration, run.used = 2, 6
    run.finish(first=6)


def test_a_bound_that_the_answers_of_a_checkpoint_cannot_keep_is_refused():
    run = Run(11, async_staleness=2)
    run.iterate()
    tensors, state, *_ = run.saved()
    later = json.loads(state)
    later["ledger"]["iteration"] += 3
    with pytest.raises(UserError, match=r"--async_staleness 2: answers of the checkpoint would be older .* give 2 and"):
        run.source.restore(tensors, later)


def test_figures_of_age_are_those_of_what_was_handed_out():
    run = Run(10, async_staleness=2)
    while run.iterate():
        ages = [run.iteration - 1 - version for version in run.lines[-1]["versions"]]
        assert run.figures["age"] == pytest.approx(sum(ages) / len(ages))
        assert run.figures["age_max"] == max(ages)
        assert 0 <= run.figures["waiting"] <= 1 and run.figures["under_way"] == len(run.source.ledger.versions)
