"""Sessions in worker processes, which rewards and environments share; tests/rewards/test_functions and
tests/envs/test_environment_pool have more of it."""

import os
import re
import subprocess
import threading
import time
from pathlib import Path

import pytest

from tests.rewards.samples import make_reward_request
from trimtab import sandbox
from trimtab.distributed.serialization import LARGEST_MESSAGE
from trimtab.sandbox.calls import CallTimeout, SandboxError, UserCodeError, WorkerDied
from trimtab.sandbox.pool import SandboxLimits, WorkerPool
from trimtab.sandbox.process import WorkerProcess
from trimtab.sandbox.worker import MARK, end_marked

CODE = """
import os, time

def compute_score(solution_str, **others):
    exec(solution_str)
    return 1.0
"""


@pytest.fixture
def pool(tmp_path):
    file = tmp_path / "reward.py"
    file.write_text(CODE)
    how = {"shared": False, "output": "limited", "title": str(file)}
    made = WorkerPool("trimtab.rewards.signatures", str(file), SandboxLimits(seconds=1.0, workers=2), **how)
    yield made
    made.close()


def call(pool, *codes):
    return pool.open("score", make_reward_request(list(codes)), final=True, replies=len(codes))


@pytest.mark.parametrize(
    "code, error, words",
    [
        ("1 / 0", UserCodeError, "ZeroDivisionError: division by zero (line 5)"),
        ("time.sleep(9)", CallTimeout, "took longer than 1 s"),
        ("os._exit(3)", WorkerDied, "its process died (exit code 3)"),
    ],
    ids=["raises", "hangs", "dies"],
)
def test_whatever_happens_to_a_call_is_one_kind_of_error_in_one_line(pool, code, error, words):
    session = call(pool, "pass", code)
    assert pool.result(session) == 1.0
    with pytest.raises(error) as caught:
        pool.result(session)
    assert isinstance(caught.value, SandboxError) and str(caught.value) == words
    assert pool.result(call(pool, "pass")) == 1.0


def test_a_reply_in_time_is_in_time_though_the_listener_was_busy(pool, monkeypatch):
    assert [pool.result(one) for one in (call(pool, "pass"), call(pool, "pass"))] == [1.0, 1.0]  # both have started
    ending = threading.Event()

    def kill(process, kill=WorkerProcess.kill):
        ending.set()
        time.sleep(1.5)  # as where thousands of processes are looked through
        return kill(process)

    monkeypatch.setattr(WorkerProcess, "kill", kill)
    hanging = call(pool, "time.sleep(9)")
    time.sleep(0.5)
    quick = call(pool, "time.sleep(0.8)")
    assert pool.result(quick) == 1.0 and ending.is_set()
    with pytest.raises(CallTimeout):
        pool.result(hanging)


def test_a_call_that_is_dropped_has_no_reply_and_its_process_serves_no_other(pool):
    session = call(pool, "time.sleep(0.3)", "pass")
    pool.drop(session)
    assert pool.result(call(pool, "pass")) == 1.0
    time.sleep(0.5)
    assert not session.inbox


@pytest.mark.long
def test_a_request_may_be_larger_than_any_reply(pool):
    request = make_reward_request(["pass"], note=["x" * (LARGEST_MESSAGE + 1)])
    assert pool.result(pool.open("score", request, final=True)) == 1.0


def test_the_run_unpickles_nothing():
    folder = Path(sandbox.__file__).parent
    inside = {"worker.py", "calls.py"}  # what runs in worker processes, and trusts the run
    for file in folder.glob("*.py"):
        assert file.name in inside or not re.search(r"pickle\.loads?|\.recv\(\)", file.read_text()), file


def test_what_user_code_prints_at_its_end_is_shown(tmp_path):
    file = tmp_path / "reward.py"
    file.write_text("import atexit\natexit.register(print, 'closing the file')\n" + CODE)
    arguments = [str(2**33), "1.0", "1", "trimtab.rewards.signatures", str(file)]
    process = WorkerProcess("trimtab.sandbox.worker", arguments, output="tail")
    assert b"loaded" in process.socket.recv(4096)
    process.leave()
    assert process.last_output() == "closing the file\n"


def test_processes_with_a_mark_end_also_if_they_have_just_started():
    for number in range(50):
        variables = os.environ | {MARK: f"{os.getpid()}-{number}"}
        process = subprocess.Popen(["sleep", "1000"], env=variables, start_new_session=True)
        end_marked(variables[MARK])
        assert process.wait(timeout=5.0) < 0
