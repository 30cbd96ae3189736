"""Environments in processes of their own: what they say comes back, and whatever they do harms nobody else."""

import os
import re
import textwrap
import time

import pytest

from tests.processes import has_ended
from trimtab.envs import environment_pool
from trimtab.envs.environment_pool import (
    EndReply,
    EnvironmentPool,
    FailureReply,
    LocalEnvironmentPool,
    ResetReply,
    SandboxLimits,
    StepReply,
)
from trimtab.envs.types import Step, Task, Turn
from trimtab.errors import UserError
from trimtab.sandbox.process import RunStopped

CODE = """
    import asyncio, json, os, pathlib, signal, subprocess, sys, threading, time
    from trimtab.envs.types import Step

    TOGETHER = threading.Barrier(4)

    def add(a: int, b: int) -> int:
        \"\"\"The sum.

        Args:
            a: one number
            b: another
        \"\"\"
        return a + b

    def raises() -> str:
        \"\"\"Nothing.\"\"\"
        raise ValueError("no such page")

    class World:
        tools = [add, raises]

        def reset(self, task):
            self.task, self.thread, self.texts = task, threading.get_ident(), []
            return None if task.row == 0 else f"row {task.row}, sample {task.sample}, seed {task.seed}"

        def step(self, turn):
            self.texts.append(turn.text)
            word, _, rest = turn.text.partition(" ")
            if word == "do":
                exec(rest, globals() | {"turn": turn, "self": self})
            if word == "wait":
                time.sleep(float(rest))
            found = {"pid": os.getpid(), "thread": threading.get_ident() == self.thread, "texts": self.texts}
            said = getattr(self, "said", json.dumps(found))
            return Step(said, 0.5, turn.text == "bye", logs={"turn": turn.number})

        def get_reward(self):
            return len(self.texts)
"""
ASYNC = """
    import asyncio, time
    from trimtab.envs.types import Step

    waiting = most = 0

    class World:
        opened = False
        async def reset(self, task):
            self.opened = True
            await asyncio.sleep(0)
        async def step(self, turn):
            word, _, rest = turn.text.partition(" ")
            if word == "wait":
                global waiting, most
                waiting += 1
                most = max(most, waiting)
                await asyncio.sleep(float(rest))
                waiting -= 1
                return Step(str(most))
            if word == "block":
                time.sleep(float(rest))
            if word == "exit":
                raise SystemExit(4)
            return Step(turn.text)
        async def close(self):
            if self.opened:
                raise OSError("too late")
"""


def said(text, number=0, calls=()):
    message = {"role": "assistant", "content": text} | ({"tool_calls": list(calls)} if calls else {})
    return Turn(text, message, [1, 2], "stop", number, 100)


def call(name, identity="c", **arguments):
    return {"id": identity, "type": "function", "function": {"name": name, "arguments": arguments}}


def collected(pool, count, seconds=20.0):
    """The next so many replies, by episode."""
    found, deadline = [], time.monotonic() + seconds
    while len(found) < count and time.monotonic() < deadline:
        found += pool.poll(0.5)
    assert len(found) == count, found
    assert len({reply.episode for reply in found}) == count
    return {reply.episode: reply for reply in found}


def one(pool):
    (found,) = collected(pool, 1).values()
    return found


def opened(pool, *episodes):
    for episode in episodes:
        pool.reset(episode, Task(episode, 0, 0))
    assert all(isinstance(reply, ResetReply) for reply in collected(pool, len(episodes)).values())


def told(pool, episode, text, **how):
    """The reply to one turn."""
    pool.step(episode, said(text, **how))
    return one(pool)


def process_of(pool, episode):
    reply = told(pool, episode, "where")
    assert isinstance(reply, StepReply)
    return int(reply.step.messages[0]["content"].partition('"pid": ')[2].partition(",")[0])


def make_pool(folder, code=CODE, seconds=20.0, workers=1, threads=4, memory_gib=2.0, **others):
    (folder / "world.py").write_text(textwrap.dedent(code))
    return EnvironmentPool(str(folder / "world.py"), SandboxLimits(seconds, workers, threads, memory_gib), **others)


@pytest.fixture
def pool_of(tmp_path):
    made = []

    def make(*code, **how):
        made.append(make_pool(tmp_path, *code, **how))
        return made[-1]

    yield make
    for pool in made:
        pool.close()


@pytest.fixture(scope="module")
def pool(tmp_path_factory):
    """For tests that end no process."""
    made = make_pool(tmp_path_factory.mktemp("pool"))
    yield made
    made.close()


@pytest.fixture(autouse=True)
def _nothing_is_left(request):
    yield
    if "pool" in request.fixturenames:
        pool = request.getfixturevalue("pool")
        for episode in range(10):
            pool.drop(episode)
        assert pool.poll(0.0) == []


def test_an_episode_is_opened_played_and_ended(pool):
    assert pool.info.name == "World" and pool.info.kind == "environment"
    pool.reset(7, Task(3, 2, 11))
    opening = one(pool)
    assert opening.episode == 7 and opening.seconds > 0
    assert opening.messages == [{"role": "user", "content": "row 3, sample 2, seed 11"}]
    assert [tool["function"]["name"] for tool in opening.tools] == ["add", "raises"]
    first = told(pool, 7, "hello")
    assert (first.step.reward, first.step.done, first.step.logs, first.tool_calls) == (0.5, False, {"turn": 0.0}, 0)
    last = told(pool, 7, "bye", number=1)
    assert last.step.done and '["hello", "bye"]' in last.step.messages[0]["content"]
    pool.end(7)
    assert one(pool) == EndReply(7, 2.0, {}, pytest.approx(0.0, abs=1.0))
    assert pool.poll(0.0) == []
    pool.reset(7, Task(0, 0, 0))
    assert one(pool).messages is None, "the row's own prompt, and a number may be used again"


def test_tools_are_called_and_what_fails_is_told_to_the_model_and_counted(pool):
    opened(pool, 1)
    reply = told(pool, 1, "", calls=[call("add", "x", a=1, b=2), call("raises"), call("sub"), call("add", a=1)])
    contents = [message["content"] for message in reply.step.messages]
    assert [message["role"] for message in reply.step.messages] == ["tool"] * 4
    assert reply.step.messages[0] == {"role": "tool", "name": "add", "tool_call_id": "x", "content": "3"}
    assert contents[1] == '{"error": "ValueError: no such page"}'
    assert "no tool sub" in contents[2] and "'b'" in contents[3]
    assert (reply.tool_calls, reply.tool_failures, reply.unknown_tools) == (4, 2, 1)
    assert '["and then"]' in told(pool, 1, "and then").step.messages[0]["content"], "the turn of tools was no step"


FAULTS = {
    "raises": ("do 1 / 0", "ZeroDivisionError: division by zero (line 31)"),
    "stops": ("do next(iter([]))", "RuntimeError: StopIteration (line 31)"),
    "exits": ("do sys.exit(3)", "SystemExit: 3 (line 31)"),
}


def test_what_raises_breaks_its_episode_alone(pool):
    opened(pool, *range(len(FAULTS) + 1))
    before = process_of(pool, len(FAULTS))
    for episode, (text, words) in enumerate(FAULTS.values()):
        pool.step(episode, said(text))
        assert one(pool) == FailureReply(episode, words)
    assert process_of(pool, len(FAULTS)) == before


DEATHS = {
    "leaves": ("do os._exit(3)", "its process died (exit code 3)"),
    "is killed": ("do os.kill(os.getpid(), signal.SIGSEGV)", "its process died (signal SIGSEGV)"),
    "eats memory": ("do bytearray(10**11)", "needed more than 2 GiB of memory"),
    "hangs": ("wait 100", "took longer than 1 s (line "),
    "closes all": ("do os.closerange(3, 100); time.sleep(30)", "its process died (signal SIGKILL)"),
    "stops": ("do os.kill(os.getpid(), signal.SIGSTOP)", "nothing was heard of its process for longer than 6 s"),
    "lets nobody work": ("do import re; re.match('(a+)+b', 'a' * 60)", "nothing was heard of its process for longer"),
}
SHORT = ("leaves", "eats memory", "hangs")


@pytest.mark.parametrize(
    "text, words",
    [pytest.param(*DEATHS[name], id=name, marks=() if name in SHORT else pytest.mark.long) for name in DEATHS],
)
def test_who_dies_or_hangs_is_named_and_others_there_are_innocent(pool_of, text, words):
    pool = pool_of(seconds=1.0)
    opened(pool, 1, 2)
    pid = process_of(pool, 2)
    pool.step(1, said(f"{text}"))
    replies = collected(pool, 2)
    assert replies[1].words.startswith(words) and not replies[1].innocent
    assert replies[2].innocent and "another episode's sake" in replies[2].words
    assert has_ended(pid)
    pool.step(2, said("is heard by nobody"))
    opened(pool, 1, 2)
    assert process_of(pool, 1) != pid


@pytest.mark.parametrize("where", ["in a process", "here"])
def test_a_call_that_takes_long_is_reported_once_while_it_is_waited_for(pool_of, where, monkeypatch, capfd):
    monkeypatch.setattr(environment_pool, "PATIENCE", 0.3)
    if where == "here":

        class World:
            def reset(self, task): ...

            def step(self, turn):
                time.sleep(float(turn.text.removeprefix("wait ")))
                return Step("awake")

        pool = LocalEnvironmentPool(World, SandboxLimits(1.5, 1, 4))
    else:
        pool = pool_of(seconds=1.5)
    for episode, sample in ((1, 0), (2, 3), (3, 4)):
        pool.reset(episode, Task(episode, sample, 0))
    collected(pool, 3)
    capfd.readouterr()
    pool.step(2, said("wait 100"))
    pool.step(3, said("wait 100"))
    began = time.monotonic()
    while not (shown := capfd.readouterr().err):
        assert not pool.poll(0.05) and time.monotonic() - began < 1.4
    assert re.match(r"waiting for \d s now: environment \S+, step of row 2, sample 3", shown)
    assert " and 1 more" in shown and shown.endswith("; given up after 2 s (--env_timeout)\n"), shown
    replies = []
    while len(replies) < 2:
        replies += pool.poll(0.5)
    assert all(isinstance(reply, FailureReply) for reply in replies) and not capfd.readouterr().err
    pool.close()


def test_an_environment_that_is_always_slow_is_reported_once(monkeypatch, capsys):
    monkeypatch.setattr(environment_pool, "PATIENCE", 0.2)
    calls = environment_pool.PendingCalls("slow.py", 60.0)
    for expected in (1, 0):
        calls.begin(7, "reset", Task(7, 0, 0))
        time.sleep(0.25)
        calls.report()
        calls.report()
        calls.answered(ResetReply(7, None))
        assert capsys.readouterr().err.count("reset of row 7") == expected


def test_of_several_that_may_have_done_it_none_is_blamed_before_it_is_known(pool_of):
    """Who ends a process while others are being asked there is found out by asking them one after another."""
    pool = pool_of()
    opened(pool, 1, 2, 3, 4)
    for episode, text in enumerate(("wait 5", "do time.sleep(0.3); os._exit(7)", "wait 5"), 1):
        pool.step(episode, said(text))
    replies = collected(pool, 4)
    assert all(reply.innocent for reply in replies.values())
    assert "another episode's sake" in replies[4].words and "another" not in replies[2].words
    opened(pool, 1, 2, 3, 4)
    shared = process_of(pool, 4)
    for episode, text in enumerate(("wait 0.1", "do os._exit(7)", "wait 0.1"), 1):
        pool.step(episode, said(text))
    replies = []
    while len(replies) < 4:
        replies += pool.poll(10)
    assert isinstance(replies[0], StepReply) and replies[0].episode == 1
    assert [(reply.episode, reply.innocent) for reply in replies[1:]] == [(1, True), (2, False), (3, True)]
    assert process_of(pool, 4) == shared


def test_who_leaves_something_that_ends_the_process_later_is_no_innocent(pool_of):
    pool = pool_of()
    opened(pool, 1)
    assert isinstance(told(pool, 1, "do threading.Timer(0.2, os._exit, [5]).start()"), StepReply)
    assert one(pool) == FailureReply(1, "its process died (exit code 5)")


def test_the_last_lines_that_were_printed_are_named(pool_of, capfd):
    pool = pool_of()
    opened(pool, 1)
    printed = "do print('x' * 10**7); print('the cause'); sys.stderr.write('of it all'); os._exit(1)"
    assert told(pool, 1, printed).words.endswith("/ the cause / of it all")
    assert capfd.readouterr() == ("", ""), "nothing of it is the run's"


def test_coroutines_wait_together_and_one_that_is_late_ends_alone(pool_of):
    pool = pool_of(ASYNC, seconds=2.0, threads=2)
    opened(pool, *range(100))
    pool.step(99, said("wait 100"))
    for episode in range(99):
        pool.step(episode, said("wait 0.3"))
    replies = collected(pool, 100)
    assert replies.pop(99) == FailureReply(99, "took longer than 2 s")
    assert max(int(reply.step.messages[0]["content"]) for reply in replies.values()) > 50
    assert told(pool, 0, "exit") == FailureReply(0, "SystemExit: 4 (line 24)")
    pool.end(1)
    assert one(pool).logs == {"close_failures": 1.0}


def test_a_coroutine_that_holds_up_the_others_is_found(pool_of):
    pool = pool_of(ASYNC, seconds=0.5)
    opened(pool, 1, 2)
    pool.step(1, said("wait 0.1"))
    pool.step(2, said("block 100"))
    replies = collected(pool, 2)
    assert not replies[2].innocent and replies[2].words.startswith("a coroutine held up all others")
    assert "(line 22)" in replies[2].words


def test_plain_calls_run_at_once_each_episode_in_its_thread(pool):
    opened(pool, *range(8))
    for first in (0, 4):
        for episode in range(first, first + 4):
            pool.step(episode, said("do TOGETHER.wait(15)"))  # which raises where fewer than four come
        for reply in collected(pool, 4).values():
            assert '"thread": true' in reply.step.messages[0]["content"]


def test_waiting_for_a_thread_is_nobodys_time(pool_of):
    pool = pool_of(threads=1, seconds=1.0)
    opened(pool, 1, 2, 3)
    for episode in (1, 2, 3):
        pool.step(episode, said("wait 0.4"))
    for reply in collected(pool, 3).values():
        assert isinstance(reply, StepReply) and 0.4 <= reply.seconds < 1.0


def test_an_episode_that_is_dropped_says_nothing_more(pool):
    opened(pool, 1, 2)
    pool.step(1, said("wait 0.3"))
    pool.drop(1)
    pool.drop(1)
    opened(pool, 1)
    assert told(pool, 2, "wait 0.5").episode == 2
    assert pool.poll(0.1) == []


def test_a_flood_of_an_observation_is_cut_in_its_middle(pool):
    opened(pool, 1)
    content = told(pool, 1, "do self.texts.append('y' * 10**7)").step.messages[0]["content"]
    assert len(content) < 1_000_100 and "characters left out ...]" in content
    assert content.startswith('{"pid"') and content.endswith('y"]}')


def test_what_no_tokenizer_can_read_is_made_readable_or_refused(pool):
    opened(pool, 1, 2)
    assert told(pool, 1, "do self.said = 'a' + chr(0xD800) + 'b'").step.messages[0]["content"] == "a?b"
    refused = FailureReply(2, "TypeError: the content of a message is int 5: a text is needed")
    assert told(pool, 2, "do self.said = [{'role': 'user', 'content': 5}]") == refused


CHILD = (
    "do child = subprocess.Popen(['sleep', '1000'], start_new_session={apart}); "
    "pathlib.Path({place!r}).write_text(str(child.pid)); {then}"
)


@pytest.mark.parametrize("apart", [False, True], ids=["", "in a group of its own"])
@pytest.mark.parametrize(
    "then",
    [
        "pass",
        pytest.param("child.wait()", marks=pytest.mark.long),
        pytest.param("os._exit(3)", marks=pytest.mark.long),
        pytest.param("threading.Thread(target=time.sleep, args=[1000]).start()", marks=pytest.mark.long),
    ],
    ids=["ends", "waits", "dies", "leaves a thread"],
)
def test_what_an_environment_started_ends_with_it(pool_of, tmp_path, then, apart):
    pool = pool_of(seconds=0.5)
    opened(pool, 1)
    told(pool, 1, CHILD.format(place=str(tmp_path / "pid"), then=then, apart=apart))
    began = time.monotonic()
    pool.close()
    assert time.monotonic() - began < 10.0
    assert has_ended(int((tmp_path / "pid").read_text()))


def test_a_fork_may_leave_alone(pool_of):
    pool = pool_of()
    opened(pool, 1)
    before = process_of(pool, 1)
    assert isinstance(told(pool, 1, "do pid = os.fork(); pid or sys.exit(0); time.sleep(0.2)"), StepReply)
    assert process_of(pool, 1) == before
    ended = told(pool, 1, "do os._exit(1)")
    assert isinstance(ended, FailureReply), "the end of its process is seen, though the fork lives"


def test_a_run_that_is_killed_takes_them_along(tmp_path):
    read, write = os.pipe()
    run = os.fork()
    if run == 0:
        try:
            pool = make_pool(tmp_path)
            opened(pool, 1)
            os.write(write, str(process_of(pool, 1)).encode())
            told(pool, 1, CHILD.format(place=str(tmp_path / "pid"), then="pass", apart=True))
            pool.step(1, said("do import re; re.match('(a+)+b', 'a' * 60)"))  # which lets no other thread work
            time.sleep(0.5)
            if (fork := os.fork()) > 0:
                os.write(write, f" {fork}".encode())
            time.sleep(30)  # the fork holds the run's end of everything open
        finally:
            os._exit(0)
    pid = int(os.read(read, 100))
    fork = int(os.read(read, 100))
    os.kill(run, 9)
    os.waitpid(run, 0)
    ended = has_ended(pid) and has_ended(int((tmp_path / "pid").read_text()))
    os.kill(fork, 9)
    assert ended


AGENT = """
    import time
    async def run(task, *, base_url, api_key, model):
        return {"reward": task.row, "asked": float(base_url == "http://x/v1" and (api_key, model) == ("k", "m"))}
"""
PLAIN_AGENT = """
    import time
    def run(task, *, base_url, api_key, model):
        time.sleep(0.3)
        return 1 / task.row
"""


def test_an_agent_runs_by_itself_and_may_take_longer_than_a_call(pool_of):
    pool = pool_of(AGENT)
    assert pool.info.kind == "agent"
    for episode in range(20):
        pool.run(episode, Task(episode, 0, 0), base_url="http://x/v1", api_key="k", model="m")
    replies = collected(pool, 20)
    assert all((reply.reward, reply.logs) == (episode, {"asked": 1.0}) for episode, reply in replies.items())
    pool = pool_of(PLAIN_AGENT, seconds=0.1)
    for row in (0, 4):
        pool.run(row, Task(row, 0, 0), base_url="", api_key="", model="")
    replies = collected(pool, 2)
    assert replies[4].reward == 0.25 and "ZeroDivisionError" in replies[0].words


ROWS = """
    def rows(count, seed):
        if seed < 0:
            raise ValueError("no such seed")
        if seed > 5:
            return ["a text"] if seed == 6 else "a text"
        return [{"prompt": f"{seed} {row}"} for row in range(count)]
"""


def test_rows_of_its_own_are_asked_for(pool_of):
    pool = pool_of(textwrap.dedent(CODE) + textwrap.dedent(ROWS))
    assert pool.info.offers_rows and pool.rows(2, 5) == [{"prompt": "5 0"}, {"prompt": "5 1"}]
    with pytest.raises(UserError, match="no such seed"):
        pool.rows(1, -1)
    for seed in (6, 7):
        with pytest.raises(UserError, match="gave str 'a text': a list of dicts is needed"):
            pool.rows(1, seed)


def test_a_source_that_cannot_be_loaded_is_one_line(pool_of):
    for code, words in (
        ("x = 1", "there is no environment in it"),
        ("import nothing_like_this", "No module named 'nothing_like_this'"),
        ("print('because')\nimport os\nos._exit(3)", r"its process died \(exit code 3\); printed last: because"),
    ):
        with pytest.raises(UserError, match=words):
            pool_of(code)


def test_a_run_that_is_told_to_stop_waits_no_longer(pool_of):
    stop = []
    pool = pool_of(stopped=lambda: bool(stop))
    opened(pool, 1)
    pool.step(1, said("wait 10"))
    assert pool.poll(0.1) == []
    stop.append(True)
    with pytest.raises(RunStopped):
        pool.poll(100)
