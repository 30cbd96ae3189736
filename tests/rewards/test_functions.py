"""Files of reward functions in their processes: every signature, every fault, and the row that caused it."""

import contextlib
import dataclasses
import math
import multiprocessing
import os
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.processes import has_ended
from tests.rewards.samples import make_reward_request
from trimtab.errors import UserError
from trimtab.rewards.functions import FunctionReward
from trimtab.rewards.types import RewardFailed, RewardRequest
from trimtab.sandbox import worker as within
from trimtab.sandbox.process import RunStopped, Waiter
from trimtab.sandbox.worker import MOST_PRINTED, PRINTED_A_SECOND


@pytest.fixture
def reward_of(tmp_path):
    """A reward of this code, closed at the end."""
    made = []

    def make(code, place="reward.py", **limits):
        (tmp_path / place.split(":")[0]).write_text(textwrap.dedent(code))
        made.append(FunctionReward(str(tmp_path / place), **limits))
        return made[-1]

    yield make
    for reward in made:
        reward.close()


OF_QUERIES = "    return [len(query) - len(prompt) for query, prompt in zip(queries, prompts)]"
SIGNATURES = {
    "openrlhf": f"def reward_func(queries, prompts, labels):\n{OF_QUERIES}",
    "openrlhf_more": f"def reward_func(queries, prompts, labels, **kwargs):\n{OF_QUERIES}",
    "openrlhf_async": f"async def reward_func(queries, prompts, labels):\n{OF_QUERIES}",
    "trl": "def score(prompts, completions, **kwargs):\n    return [len(c) for c in completions]",
    "trl_column": "def score(completions, answer, **kwargs):\n    return [len(a) for a in answer]",
    "trl_async": "async def score(prompts, completions, answer):\n    return [len(c) for c in completions]",
    "verl": "def compute_score(data_source, solution_str, ground_truth, extra_info):\n    return len(ground_truth)",
    "verl_more": "def compute_score(solution_str, **kwargs):\n    return len(solution_str)",
    "verl_async": "async def compute_score(solution_str, ground_truth, extra_info):\n    return len(ground_truth)",
}


@pytest.mark.parametrize("code", SIGNATURES.values(), ids=SIGNATURES)
def test_every_signature_is_recognised_and_keeps_the_order(reward_of, code):
    responses = ["x" * (1 + 7 * row % 23) for row in range(50)]
    result = reward_of(code, workers=2)(make_reward_request(responses, labels=responses, answer=responses))
    assert result.rewards == [float(len(response)) for response in responses] == result.scores


def test_verl_gets_its_columns_and_the_truth_where_its_own_data_have_it(reward_of):
    code = """
        def compute_score(data_source, solution_str, ground_truth, extra_info=None):
            return {"score": extra_info["index"], "same": ground_truth == solution_str, "note": data_source}
    """
    columns = {
        "data_source": ["kk", "kk"],
        "extra_info": [{"index": 4}, {"index": 5}],
        "reward_model": [{"ground_truth": "a"}, {"ground_truth": "b"}],
    }
    result = reward_of(code, workers=1)(make_reward_request(["a", "a"], **columns))
    assert result.rewards == [4.0, 5.0] and result.logs == {"same": [1.0, 0.0]}


def test_trl_gets_tokens_too_and_none_means_that_a_reward_does_not_apply(reward_of):
    reward = reward_of("def f(completions, completion_ids, **columns):\n    return [len(completion_ids[0]), None]")
    request = RewardRequest(["a", "b"], ["", ""], ["a", "b"], [None] * 2, {}, [[0], [0]], [[1, 2, 3], [4]])
    first, second = reward(request).rewards
    assert first == 3.0 and math.isnan(second)


def test_a_dict_has_rewards_scores_and_logs(reward_of):
    code = """
        def reward_func(queries, prompts, labels):
            return {"rewards": [1, 2], "scores": [0.1, 0.2], "extra_logs": {"each": [3, 4], "all": 5.0}}
    """
    result = reward_of(code)(make_reward_request(["a", "b"]))
    assert result.rewards == [1.0, 2.0] and result.scores == [0.1, 0.2]
    assert result.logs == {"each": [3.0, 4.0], "all": [5.0, 5.0]}


def test_a_tensor_is_a_list_of_rewards(reward_of):
    code = "import torch\ndef reward_func(queries, prompts, labels):\n    return torch.tensor([[1.5], [2.5]])[:, 0]"
    assert reward_of(code)(make_reward_request(["a", "b"])).rewards == [1.5, 2.5]


def test_a_function_is_named_after_a_colon_where_there_are_several(reward_of):
    code = "def one(completions):\n    return [1.0]\ndef two(completions):\n    return [2.0]"
    assert reward_of(code, "reward.py:two")(make_reward_request(["a"])).rewards == [2.0]
    with pytest.raises(UserError, match=r"one, two could all be meant: .*reward.py|FILE.py:one"):
        reward_of(code)


def test_a_file_imports_its_neighbours_and_says_whose_code_runs(reward_of, tmp_path):
    (tmp_path / "neighbour.py").write_text("VALUE = 7")
    reward = reward_of("from neighbour import VALUE\ndef f(completions):\n    return [VALUE] * len(completions)")
    assert reward(make_reward_request(["a"])).rewards == [7.0]
    assert str(reward) == f"f (batches, 1 process), which runs the code of {tmp_path / 'reward.py'}"


@pytest.mark.parametrize(
    "code, words",
    [
        ("def reward_func(queries, prompts, labels) return 1", "SyntaxError"),
        ("import a_package_that_nobody_has", "No module named 'a_package_that_nobody_has'.*line 1"),
        ("x = 1", "no function in it whose parameters"),
        ("def reward_func(a, b):\n    return 1", "no function in it whose parameters"),
        ("import sys\nsys.exit(3)", "SystemExit: 3"),
        ("import os\nos._exit(3)", "process died .exit code 3"),
    ],
)
def test_a_file_that_cannot_be_used_is_one_line_before_the_run(reward_of, code, words):
    with pytest.raises(UserError, match=words):
        reward_of(code)


def test_a_file_that_is_not_there_is_one_line(tmp_path):
    with pytest.raises(UserError, match="no such file"):
        FunctionReward(str(tmp_path / "nothing.py"))


FAULTS = {
    "raises": ("1 / 0", "ZeroDivisionError: division by zero"),
    "exits": ("__import__('sys').exit(1)", "SystemExit"),
    "dies": ("__import__('os')._exit(9)", "process died .exit code 9"),
    "is killed": ("__import__('os').kill(__import__('os').getpid(), 9)", "SIGKILL"),
    "eats memory": ("bytearray(10**11)", "more than 0.5 GiB of memory"),
}
HANGS = {"hangs": "__import__('time').sleep(100)", "spins": "[0 for _ in iter(int, 1)]"}
BATCHED = """
    def reward_func(queries, prompts, labels):
        if any("bad" in query for query in queries):
            {}
        return [len(query) for query in queries]
"""
SINGLE = """
    def compute_score(data_source, solution_str, ground_truth, extra_info):
        if "bad" in solution_str:
            {}
        return len(solution_str)
"""


@pytest.mark.parametrize("code", [BATCHED, SINGLE], ids=["batched", "single"])
@pytest.mark.parametrize("fault, words", FAULTS.values(), ids=FAULTS)
def test_a_fault_names_its_row_and_the_next_request_is_answered(reward_of, code, fault, words):
    reward = reward_of(code.format(fault), seconds=0.3, memory_gib=0.5, workers=1)
    responses = ["good"] * 20
    responses[13] = "bad"
    with pytest.raises(RewardFailed, match=f"row 13 .prompt 'prompt 13:'.: .*{words}") as caught:
        reward(make_reward_request(responses))
    assert caught.value.row == 13
    assert len(reward(make_reward_request(["good"] * 3))) == 3


@pytest.mark.parametrize("fault", HANGS.values(), ids=HANGS)
def test_a_sample_that_takes_too_long_is_named_with_the_limit(reward_of, fault):
    reward = reward_of(SINGLE.format(fault), seconds=0.3, workers=1)
    with pytest.raises(RewardFailed, match=r"row 2 .prompt 'prompt 2:'.: took longer than 0.3 s"):
        reward(make_reward_request(["good", "good", "bad"]))
    assert len(reward(make_reward_request(["good"] * 3))) == 3


@pytest.mark.parametrize("fault", HANGS.values(), ids=HANGS)
def test_a_batch_that_takes_too_long_is_named_with_its_time_and_the_limit_and_is_not_tried_again(reward_of, fault):
    reward = reward_of(BATCHED.format(fault), seconds=0.3)
    began = time.monotonic()
    told = r"reward_func was ended after 0\.[3-9] s on a batch of 3 samples \(rows 0 to 2\): a call may take 0.3 s"
    with pytest.raises(RewardFailed, match=told) as caught:
        reward(make_reward_request(["good", "good", "bad"]))
    assert caught.value.row is None and time.monotonic() - began < 1.0
    assert len(reward(make_reward_request(["good"] * 3))) == 3


CHILDREN = """
    import pathlib, subprocess, time
    def reward_func(queries, prompts, labels):
        child = subprocess.Popen(["sleep", "1000"])
        pathlib.Path({place!r}).write_text(str(child.pid))
        {then}
        return [0.0] * len(queries)
"""
CHILDREN_LEFT = {"ends": "pass", "waits": "child.wait()", "dies": "__import__('os')._exit(3)"}


@pytest.mark.parametrize("then", CHILDREN_LEFT.values(), ids=CHILDREN_LEFT)
def test_what_a_function_started_ends_with_its_call_or_its_reward(reward_of, tmp_path, then):
    reward = reward_of(CHILDREN.format(place=str(tmp_path / "pid"), then=then), seconds=1.0)
    with contextlib.suppress(RewardFailed):
        reward(make_reward_request(["a"]))
    child = int((tmp_path / "pid").read_text())
    if then == "pass":
        assert not has_ended(child, 0.2), "a function may leave something running between its calls"
    reward.close()
    assert has_ended(child)


def test_what_a_function_started_ends_with_a_run_that_is_killed(tmp_path):
    function = tmp_path / "reward.py"
    function.write_text(textwrap.dedent(CHILDREN.format(place=str(tmp_path / "pid"), then="child.wait()")))
    run = multiprocessing.get_context("fork").Process(target=score_for_ever, args=(str(function),))
    run.start()
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        time.sleep(0.01)
    run.kill()
    run.join()
    assert has_ended(int((tmp_path / "pid").read_text()))


def score_for_ever(place):
    FunctionReward(place)(make_reward_request(["a"]))


def test_a_fault_of_the_batch_as_a_whole_says_so(reward_of):
    code = "def f(completions):\n    assert len(completions) < 4, 'too many'\n    return [1] * len(completions)"
    with pytest.raises(RewardFailed, match=r"rows 0 to 3 together, but on neither half .*too many") as caught:
        reward_of(code)(make_reward_request(["a"] * 4))
    assert caught.value.row is None


@pytest.mark.parametrize(
    "value, words",
    [
        ("[1, 2]", "2 for 3 samples"),
        ("[1, float('nan'), 3]", "reward of row 1 is nan"),
        ("[1, 2, 'x']", "reward of row 2 is str"),
        ("None", "is NoneType"),
        ("{'scores': [1, 2, 3]}", "but no rewards"),
        ("{'rewards': [1, 2, 3], 'scores': [1]}", "score: 1 for 3 samples"),
        ("{'rewards': [1, 2, 3], 'extra_logs': {'a': [1]}}", "extra_logs a: a number, or one for each of 3"),
        ("{'rewards': [1, 2, 3], 'extra_logs': [1]}", "extra_logs is list"),
        ("object()", "is str"),
        ("[1, 2, object()]", "row 2 is str '<object>'"),
    ],
)
def test_a_wrong_return_is_named(reward_of, value, words):
    reward = reward_of(f"def reward_func(queries, prompts, labels):\n    return {value}")
    with pytest.raises(RewardFailed, match=words):
        reward(make_reward_request(["a", "b", "c"]))


def test_a_wrong_return_for_a_single_sample_names_the_row(reward_of):
    code = "def compute_score(solution_str, **others):\n    return float('inf') if solution_str == 'x' else 1"
    with pytest.raises(RewardFailed, match="row 5 is inf") as caught:
        reward_of(code, workers=2)(make_reward_request([*"abcdexfgh"]))
    assert caught.value.row == 5


def test_single_samples_beyond_the_limits_may_be_given_a_reward(reward_of):
    reward = reward_of(SINGLE.format("__import__('time').sleep(9)"), seconds=0.2, workers=1, stuck_reward=-1.0)
    result = reward(make_reward_request(["good", "bad", "bad", "good"]))
    assert result.rewards == [4.0, -1.0, -1.0, 4.0]
    assert result.logs["stuck"] == [0.0, 1.0, 1.0, 0.0]


def test_samples_of_an_async_function_wait_together(reward_of):
    code = """
        import asyncio
        waiting, most = 0, 0
        async def compute_score(solution_str, **others):
            global waiting, most
            waiting += 1
            most = max(most, waiting)
            await asyncio.sleep(0.01)
            waiting -= 1
            return most
    """
    assert max(reward_of(code)(make_reward_request(["a"] * 9)).rewards) == 9.0


def test_an_empty_request_calls_nobody(reward_of):
    assert len(reward_of("def f(completions):\n    return 1 / 0")(make_reward_request([]))) == 0


def test_a_worker_imports_neither_torch_nor_numpy():
    script = "import sys, trimtab.sandbox.worker, trimtab.rewards.signatures; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert not {"torch", "numpy", "transformers"} & set(done.stdout.split())


def test_workers_end_with_their_reward_and_with_their_run(reward_of, tmp_path):
    reward = reward_of("import os\ndef f(completions):\n    return [os.getpid()]")
    pid = int(reward(make_reward_request(["a"])).rewards[0])
    os.kill(pid, 0)
    reward.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_the_example_rewards_what_it_says(reward_of):
    code = (Path(__file__).parents[2] / "examples" / "reward_func.py").read_text()
    result = reward_of(code)(make_reward_request(["it is 7", "8" * 2000], ["7", "7"]))
    assert result.scores == [1.0, 0.0] and result.rewards == pytest.approx([1.0993, 0.0])
    assert result.logs["brief"] == pytest.approx([0.993, 0.0])


def test_a_file_that_breaks_during_the_run_is_a_failed_reward_and_not_a_mistake_of_the_command(reward_of):
    reward = reward_of(SINGLE.format("__import__('os')._exit(9)"), workers=1)
    with pytest.raises(RewardFailed, match="row 0"):
        reward(make_reward_request(["bad"]))
    reward.file.write_text("not Python")
    with pytest.raises(RewardFailed, match="NameError"):
        reward(make_reward_request(["good"]))


@pytest.mark.parametrize("code", [BATCHED, SINGLE], ids=["batched", "single"])
def test_a_run_that_is_told_to_stop_waits_no_longer(reward_of, code):
    stop = threading.Event()
    reward = reward_of(code.format("__import__('time').sleep(100)"), waiter=Waiter(stop.is_set), workers=2)
    threading.Timer(0.3, stop.set).start()
    began = time.monotonic()
    with pytest.raises(RunStopped):
        reward(make_reward_request(["bad"] * 4))
    reward.close()
    assert time.monotonic() - began < 2.0


def test_numbers_too_large_for_a_computer_are_named_or_logged_as_infinite(reward_of):
    reward = reward_of("def f(completions):\n    return {'rewards': [1], 'extra_logs': {'a': -10**400}}")
    assert reward(make_reward_request(["a"])).logs == {"a": [-math.inf]}
    for digits in (400, 5000):
        with pytest.raises(RewardFailed, match=r"too large for a number|Exceeds the limit"):
            reward_of(f"def f(completions):\n    return [10**{digits}]")(make_reward_request(["a"]))


def test_trl_gets_messages_of_a_conversation_and_every_column_by_its_name(reward_of):
    code = """
        def f(prompts, completions, label, other, **columns):
            assert prompts[0][-1] == {"role": "user", "content": "1 + 1"} and set(columns) >= {"log_metric", "labels"}
            assert not {"prompt", "completion"} & set(columns)
            right = [c[0]["role"] == "assistant" and c[0]["content"] == l for c, l in zip(completions, label)]
            return [float(r) + o for r, o in zip(right, other)]
    """
    columns = {"label": ["2", "2"], "other": [10, 20], "prompt": ["x", "y"]}
    talk = [[{"role": "user", "content": "1 + 1"}]] * 2
    request = dataclasses.replace(make_reward_request(["2", "3"], labels=["2", "2"], **columns), conversations=talk)
    assert reward_of(code)(request).rewards == [11.0, 20.0]


@pytest.mark.parametrize("kind", ["def", "async def"])
def test_what_a_function_of_trl_logs_is_kept_and_its_trainer_is_nobody(reward_of, kind):
    code = f"""
        {kind} f(completions, trainer_state, log_extra, log_metric):
            log_extra("length", [len(c) for c in completions])
            log_extra("words", completions)
            log_metric("mean", 0.5)
            return [float(trainer_state is None), None]
    """
    result = reward_of(code)(make_reward_request(["a", "bb"]))
    assert result.rewards[0] == 1.0 and math.isnan(result.rewards[1])
    assert result.logs == {"length": [1.0, 2.0], "mean": [0.5, 0.5]}


MEETING = """
import pathlib, time

{prefix}def {signature}:
    here = pathlib.Path(__file__).parent
    (here / {own}).touch()
    while len(list(here.glob("met*"))) < 4:  # all four calls are at work
        {pause}
    return {result}
"""
MEETINGS = {
    "batches": {"prefix": "", "signature": "reward_func(queries, prompts, labels)", "own": "f'met{labels[0]}'"},
    "single": {"prefix": "", "signature": "compute_score(solution_str, ground_truth)", "own": "f'met{ground_truth}'"},
    "async": {"prefix": "async ", "signature": "reward_func(queries, prompts, labels)", "own": "f'met{labels[0]}'"},
}


@pytest.mark.parametrize("kind", MEETINGS)
def test_several_batches_at_once_do_not_wait_for_each_other(reward_of, kind):
    result = "1.0" if kind == "single" else "[1.0] * len(queries)"
    code = MEETING.format(**MEETINGS[kind], result=result, pause="time.sleep(0.01)")
    reward = reward_of(code, seconds=30, workers=1, calls_at_once=4)
    with ThreadPoolExecutor(4) as threads:
        for found in [threads.submit(reward, make_reward_request(["x"], labels=[str(k)])) for k in range(4)]:
            assert found.result().rewards == [1.0]


def test_no_more_processes_are_started_than_are_needed_at_once(reward_of):
    reward = reward_of(
        "import os\ndef reward_func(queries, prompts, labels):\n    return [os.getpid()]", calls_at_once=9
    )
    assert len({reward(make_reward_request(["x"])).rewards[0] for _ in range(12)}) == 1
    assert "up to 9 processes" in str(reward)


PRINTS = """
import os, sys

def reward_func(queries, prompts, labels):
    print("seen first")
    for _ in range(500):
        os.write(1, b"noise " * 20_000)
        sys.stderr.write("more noise" * 1_000)
    return [len(query) for query in queries]
"""


def test_what_a_function_prints_is_shown_up_to_a_limit(reward_of, capfd):
    reward = reward_of(PRINTS)
    for _ in range(2):
        assert len(reward(make_reward_request(["a", "b"]))) == 2
    reward.close()
    shown = capfd.readouterr()
    assert shown.out == "" and shown.err.startswith("seen first\nnoise noise")
    assert shown.err.count("prints too much") == 1 and len(shown.err) < 2 * MOST_PRINTED


def test_a_little_is_shown_in_whole_also_what_was_printed_last(reward_of, capfd):
    reward = reward_of(
        "def reward_func(queries, prompts, labels):\n    print(labels)\n    return [1.0 for _ in labels]"
    )
    for _ in range(3):
        reward(make_reward_request(["a"], [1]))
    reward.close()
    assert capfd.readouterr().err == "[1]\n" * 3


def test_after_a_while_output_is_shown_again_with_what_is_missing(monkeypatch):
    written, clock = [], [0.0]
    monkeypatch.setattr(within.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(within.os, "write", lambda stream, text: written.append(text))
    show = within._Limited()
    for second, size in ((0, MOST_PRINTED + 10), (1, 100), (MOST_PRINTED / PRINTED_A_SECOND + 1, 5)):
        clock[0] = second
        show(b"x" * size)
    assert [len(written[0]), *written[2:]] == [MOST_PRINTED, b"[110 bytes were left out]\n", b"xxxxx"]
