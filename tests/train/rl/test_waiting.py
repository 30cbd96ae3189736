"""A run that waits for a reward says so, obeys a signal at once, and goes on later as if nothing had been."""

import os
import signal
import socket
import time
from functools import partial

import pytest

from tests import warm
from tests.train.rl.rl_run import arguments, assert_identical, result, without
from tests.train.rl.test_rewards import FailLater
from trimtab.sandbox import process as waiting

SLEEPS = """
import os, pathlib, time

def reward_func(queries, prompts, labels):
    if pathlib.Path({flag!r}).exists() and os.environ.get("RANK", "0") == "0":
        time.sleep(1000)
    return [len(set(query)) / 10 for query in queries]
"""
NEVER_LOADS = """
import os, time

if os.environ.get("RANK", "0") == "0":
    time.sleep(1000)

def reward_func(queries, prompts, labels):
    return [0.0] * len(queries)
"""
SOON = 8.0  # seconds: a checkpoint and a report of the run are written in them, on a busy machine


@pytest.fixture(scope="module")
def sleepy(folder, tmp_path_factory):
    """The words of a run whose reward function may fall asleep, the file that makes it, and the run that it lets be."""
    place = tmp_path_factory.mktemp("sleepy")
    flag, function, whole = place / "night", place / "reward.py", place / "whole"
    function.write_text(SLEEPS.format(flag=str(flag)))

    def words(out):
        return [*without(arguments(folder, out, "grpo"), "--reward_verifier"), "--reward_func", str(function)]

    assert warm.run(words(whole)) == 0
    return words, flag, result(whole)


def impatient(then=None):
    waiting.PATIENCE = 0.3
    if then is not None:
        then()


def end(process, log, number=signal.SIGTERM, told="samples; given up", *, sent_to=()):
    """Send the signal, to this process or to others, once its log says that it waits; how soon all have ended."""
    warm.wait_until(lambda: log.exists() and told in log.read_text(), process)
    began = time.monotonic()
    for one in sent_to or (process,):
        os.kill(one.pid, number)
    for one in (process, *sent_to):
        one.join(60)
    return time.monotonic() - began


def rewarded_by(folder, out, text) -> list[str]:
    (out / "reward.py").write_text(text)
    return [*without(arguments(folder, out, "grpo"), "--reward_verifier"), "--reward_func", f"{out}/reward.py"]


@pytest.mark.short(1)
@pytest.mark.parametrize("what, iteration", [("evaluate", 1), ("sample", 2)])
def test_a_signal_while_a_function_sleeps_is_obeyed_at_once_and_nothing_is_lost(sleepy, tmp_path, what, iteration):
    words, flag, whole = sleepy
    log = tmp_path / "log"
    process = warm.start(words(tmp_path), prepare=partial(impatient, FailLater(flag, what, iteration)), log=log)
    assert end(process, log) < SOON
    flag.unlink()
    assert process.exitcode == 128 + signal.SIGTERM
    said = log.read_text()
    assert "reward.py for" in said and "given up after 60 s at the latest" in said and "checkpoint saved in" in said
    assert warm.run([*words(tmp_path), "--load_checkpoint"]) == 0
    assert_identical(result(tmp_path), whole)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_a_server_never_answers_is_obeyed_at_once(folder, tmp_path, number):
    log = tmp_path / "log"
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/get_reward"
        words = [*without(arguments(folder, tmp_path, "grpo"), "--reward_verifier"), "--remote_rm_url", url]
        process = warm.start(words, prepare=impatient, log=log)
        assert end(process, log, number) < SOON
    assert process.exitcode == 128 + number
    said = log.read_text()
    assert f"what {url} answers for 10 samples; given up after 19 min" in said and "checkpoint saved in" in said


def test_a_signal_to_the_second_process_ends_the_wait_of_the_first(sleepy, tmp_path):
    words, flag, _ = sleepy
    flag.write_text("")
    first, second = warm.start_world(words(tmp_path), 2, log=tmp_path / "log", prepare={0: impatient})
    took = end(first, tmp_path / "log.0", sent_to=(second,))
    flag.unlink()
    assert took < SOON and first.exitcode == 128 + signal.SIGTERM
    assert "checkpoint saved in" in (tmp_path / "log.0").read_text()


def test_a_signal_to_the_second_process_while_the_first_one_loads_its_reward_stops_both(folder, tmp_path):
    words = rewarded_by(folder, tmp_path, NEVER_LOADS)
    first, second = warm.start_world(words, 2, log=tmp_path / "log", prepare={0: impatient})
    end(first, tmp_path / "log.0", told="reward.py to be loaded", sent_to=(second,))
    assert first.exitcode == 128 + signal.SIGTERM, (tmp_path / "log.0").read_text()


def test_a_stop_while_another_process_builds_its_roles_ends_both_without_a_traceback(folder, tmp_path):
    words = rewarded_by(folder, tmp_path, NEVER_LOADS.replace('== "0"', '== "1"'))
    first, second = warm.start_world(words, 2, log=tmp_path / "log", prepare={1: impatient})
    end(second, tmp_path / "log.1", told="reward.py to be loaded", sent_to=(first, second))  # as launchers do
    said = [(tmp_path / f"log.{rank}").read_text() for rank in (0, 1)]
    assert [first.exitcode, second.exitcode] == [128 + signal.SIGTERM] * 2, said
    assert "nothing is lost" in said[0] and not any("Traceback" in text for text in said)


def test_a_file_that_never_loads_does_not_hold_a_run_that_is_told_to_stop(folder, tmp_path):
    log = tmp_path / "log"
    process = warm.start(rewarded_by(folder, tmp_path, NEVER_LOADS), prepare=impatient, log=log)
    assert end(process, log, told="reward.py to be loaded") < SOON
    assert process.exitcode == 128 + signal.SIGTERM
