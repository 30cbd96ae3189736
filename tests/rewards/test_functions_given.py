import asyncio

import pytest

from tests.rewards.samples import make_reward_request
from trimtab.errors import UserError
from trimtab.rewards.functions import CallableReward, register_functions
from trimtab.rewards.types import RewardFailed


def request(*responses):
    numbers = [*map(str, range(len(responses)))]
    return make_reward_request([*responses], numbers, [f"p{number}" for number in numbers])


def reward_of(function):
    with register_functions({"f": function}):
        return CallableReward("given:f")


def test_every_signature_is_called_in_this_process():
    seen = []

    def openrlhf(queries, prompts, labels):
        seen.append(labels)
        return [len(query) for query in queries]

    def trl(prompts, completions, **columns):
        return [len(completion) for completion in completions]

    def verl(data_source, solution_str, ground_truth, extra_info=None):
        return {"score": float(len(solution_str)), "half": len(solution_str) / 2}

    asked = request("a", "bcd")
    assert reward_of(openrlhf)(asked).rewards == [3.0, 5.0] and seen == [["0", "1"]]
    assert reward_of(trl)(asked).rewards == [1.0, 3.0]
    result = reward_of(verl)(asked)
    assert result.rewards == [1.0, 3.0] and result.logs["half"] == [0.5, 1.5]


def test_what_a_function_does_to_its_lists_stays_with_it():
    def greedy(queries, prompts, labels):
        prompts.clear()
        return [0.0] * len(queries)

    asked = request("a", "b")
    reward_of(greedy)(asked)
    assert asked.prompts == ["p0", "p1"]


def test_an_async_function_is_awaited_where_a_loop_runs_and_where_none_does():
    async def slow(prompts, completions, **columns):
        await asyncio.sleep(0)
        return [1.0] * len(completions)

    async def in_a_notebook():
        return reward_of(slow)(request("a"))

    assert reward_of(slow)(request("a")).rewards == [1.0]
    assert asyncio.run(in_a_notebook()).rewards == [1.0]


def test_a_failure_names_the_row_and_the_line_and_keeps_the_exception():
    def picky(queries, prompts, labels):
        return [1.0 / (label != "2") for label in labels]

    with pytest.raises(
        RewardFailed, match=r"f failed on row 2 \(prompt 'p2'\): ZeroDivisionError.*\(line \d+\)"
    ) as raised:
        reward_of(picky)(request("a", "b", "c", "d"))
    assert isinstance(raised.value.__cause__.__cause__, ZeroDivisionError)


@pytest.mark.parametrize("answer", [["x"], [1.0, 2.0], None, [float("nan")]])
def test_what_is_no_reward_is_told(answer):
    with pytest.raises(RewardFailed, match="reward"):
        reward_of(lambda queries, prompts, labels: answer)(request("a"))


def test_a_function_that_is_not_here_or_not_known_says_what_to_do():
    with pytest.raises(UserError, match=r"was a function in Python, .* write it to a file and give FILE.py:FUNCTION"):
        CallableReward("given:f")
    with pytest.raises(UserError, match=r"the parameters of the reward f are none of \(queries, prompts, labels\)"):
        reward_of(lambda x: x)
