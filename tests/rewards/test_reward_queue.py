"""Rewards are computed while samples still come; results keep the order, and a failure keeps its words."""

import threading

import pytest

from tests.rewards.samples import Lengths, make_reward_request
from trimtab.rewards.requests import RewardQueue
from trimtab.rewards.types import RewardFailed


class Watched(Lengths):
    def __init__(self, concurrent=True, fails_at=None):
        super().__init__()
        self.concurrent, self.fails_at = concurrent, fails_at
        self.seen, self.threads = [], set()
        self.scored = threading.Semaphore(0)

    def __call__(self, request):
        self.threads.add(threading.current_thread())
        self.seen.append(request.responses[0])
        try:
            if len(self.seen) - 1 == self.fails_at:
                raise RewardFailed("no reward for row 0", 0)
            return super().__call__(request)
        finally:
            self.scored.release()


GROUPS = [["a", "bb"], ["ccc"], ["dddd", "e", "ff"]]


def submit(rewards):
    for group in GROUPS:
        rewards.submit(make_reward_request(group))


@pytest.mark.parametrize("concurrent", [True, False])
def test_results_come_in_the_order_of_submission(concurrent):
    with RewardQueue(Watched(concurrent)) as rewards:
        submit(rewards)
        assert [result.rewards for result in rewards.results()] == [[1.0, 2.0], [3.0], [4.0, 1.0, 2.0]]
        assert [r for part in rewards.results() for r in part.rewards] == [1.0, 2.0, 3.0, 4.0, 1.0, 2.0]


def test_the_first_samples_are_scored_before_the_last_ones_are_there():
    reward = Watched()
    with RewardQueue(reward) as rewards:
        for group in GROUPS:
            rewards.submit(make_reward_request(group))
            # A group's score is there while the next one is still "being generated".
            assert reward.scored.acquire(timeout=30)
    assert reward.threads and threading.current_thread() not in reward.threads


def test_a_reward_that_runs_a_model_here_is_called_only_when_results_are_asked_for():
    reward = Watched(concurrent=False)
    with RewardQueue(reward) as rewards:
        submit(rewards)
        assert reward.seen == []
        list(rewards.results())
    assert reward.threads == {threading.current_thread()}


def test_a_failure_is_raised_in_its_place_and_the_results_before_it_are_kept():
    with RewardQueue(Watched(concurrent=False, fails_at=1)) as rewards:
        submit(rewards)
        results = rewards.results()
        assert next(results).rewards == [1.0, 2.0]
        with pytest.raises(RewardFailed, match="no reward for row 0") as caught:
            next(results)
        assert caught.value.row == 0


def test_a_failure_is_raised_at_the_next_submission_so_that_nobody_generates_in_vain():
    reward = Watched(fails_at=0)
    with RewardQueue(reward) as rewards:
        rewards.submit(make_reward_request(GROUPS[0]))
        assert reward.scored.acquire(timeout=30)
        with pytest.raises(RewardFailed):
            for _ in range(1000):
                rewards.submit(make_reward_request(GROUPS[1]))


def test_leaving_early_drops_what_has_not_begun():
    entered, leave = threading.Event(), threading.Event()

    class Slow(Watched):
        def __call__(self, request):
            entered.set()
            assert leave.wait(30)
            return super().__call__(request)

    reward = Slow()
    with pytest.raises(KeyboardInterrupt), RewardQueue(reward) as rewards:
        for _ in range(20):
            rewards.submit(make_reward_request(GROUPS[0]))
        assert entered.wait(30)
        leave.set()
        raise KeyboardInterrupt
    assert len(reward.seen) < 20
