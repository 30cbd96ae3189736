"""Episodes with environments in processes of their own: tools, and everything that goes wrong."""

import json
import textwrap

import pytest

from tests.data.templates import CHATML, QWEN3
from tests.envs.chat_templates import tokenizer_of
from tests.envs.scripted_engine import ScriptedEngine
from trimtab.envs.environment_engine import EnvironmentEngine
from trimtab.envs.environment_pool import EnvironmentPool, SandboxLimits
from trimtab.envs.types import EpisodeSettings, Task
from trimtab.rollout.sampling import SamplingParams

CODE = '''
import os, pathlib, signal, sys, time
from trimtab.envs.types import Step

def divide(a: int, b: int) -> float:
    """Divides.

    Args:
        a: what is divided
        b: by what
    """
    return a / b

class Tools:
    tools = [divide]

    def reset(self, task):
        return None

    def step(self, turn):
        return Step(done=True, reward=float("2.0" in turn.text))

class Faults:
    """Row 1 does what its prompt says, in the second turn, in the first so many instances; others count to three."""

    def reset(self, task):
        self.task, self.turns = task, 0
        return [{"role": "user", "content": task.prompt}]

    def step(self, turn):
        self.turns += 1
        if self.task.row == 1 and self.turns == 2:
            done = pathlib.Path(self.task.columns["notes"])
            times = len(done.read_text()) if done.exists() else 0
            if times < self.task.columns["times"]:
                done.write_text("x" * (times + 1))
                exec(self.task.prompt)
        return Step(f"Turn {turn.number}.", reward=1.0, done=self.turns == 3)
'''


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("environment") / "worlds.py"
    path.write_text(textwrap.dedent(CODE))
    return path


def call(name, **arguments):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def test_a_tool_that_raises_is_unknown_or_gets_bad_arguments_is_the_models_business(file):
    wanted = [call("divide", a=1, b=0), call("multiply", a=1), call("divide", a="x"), call("divide", a=4, b=2)]
    wanted.append("It is 2.0, I think.")

    def say(text):
        return wanted[text.count("<|im_start|>assistant") - 1]

    tokenizer = tokenizer_of(QWEN3)
    pool = EnvironmentPool(f"{file}:Tools", SandboxLimits(workers=1))
    engine = EnvironmentEngine(ScriptedEngine(tokenizer, say), pool, tokenizer, EpisodeSettings())
    try:
        task = Task(0, 0, 1, prompt="What is four by two?")
        (rollout,) = engine.generate([[5]], SamplingParams(stop_token_ids=(tokenizer.eos_token_id,)), tasks=[task])
    finally:
        engine.close()
    opening = tokenizer.decode(rollout.prompt_ids)
    assert '"name": "divide"' in opening and "What is four by two?" in opening  # the row's prompt, with the tools
    answers = [said.messages[0] for said in rollout.episode.said if not said.drawn]
    assert [message["role"] for message in answers] == ["tool"] * 4
    assert ["error" in message["content"] for message in answers] == [True, True, True, False]
    assert "ZeroDivisionError" in answers[0]["content"] or "division by zero" in answers[0]["content"]
    assert answers[3]["content"] == "2.0"
    figures = {name: rollout.episode.logs[name] for name in ("tool_calls", "tool_failures", "unknown_tools", "turns")}
    assert figures == {"tool_calls": 4.0, "tool_failures": 2.0, "unknown_tools": 1.0, "turns": 5.0}
    assert rollout.finish == "stop" and rollout.episode.reward == 1.0
    text = tokenizer.decode(rollout.ids)
    assert text.startswith(wanted[0] + "<|im_end|>\n<|im_start|>tool\n")


FAULTS = {
    "raises": "raise RuntimeError('the database is gone')",
    "dies": "os._exit(3)",
    "segfault": "os.kill(os.getpid(), signal.SIGSEGV)",
    "exits": "sys.exit(4)",
    "hangs": "time.sleep(60)",
    "talks": "print('noise ' * 1_000_000); raise ValueError('too much')",
}


def play_faults(file, tmp_path, what, times, retries):
    tokenizer = tokenizer_of(CHATML)
    pool = EnvironmentPool(f"{file}:Faults", SandboxLimits(seconds=1.0, workers=1, threads=8))
    inner = ScriptedEngine(tokenizer, lambda text: "Yes.")
    engine = EnvironmentEngine(inner, pool, tokenizer, EpisodeSettings(retries=retries))
    columns = {"notes": str(tmp_path / "notes"), "times": times}
    tasks = [Task(row, 0, 1, FAULTS[what] if row == 1 else "Count.", columns=columns) for row in range(3)]
    try:
        return engine.generate([[5]] * 3, SamplingParams(stop_token_ids=(tokenizer.eos_token_id,)), tasks=tasks)
    finally:
        engine.close()


@pytest.mark.short(2)
@pytest.mark.parametrize("what", ["raises", "dies", "segfault", "exits", "hangs", "talks"])
def test_an_environment_that_fails_is_begun_anew_and_harms_nobody(file, tmp_path, what):
    rollouts = play_faults(file, tmp_path, what, times=2, retries=2)
    assert [rollout.finish for rollout in rollouts] == ["stop"] * 3
    assert [rollout.episode.reward for rollout in rollouts] == [3.0] * 3
    first, anew, last = (rollout.episode.begun for rollout in rollouts)
    # Where its process died with all that were asked something there, none is blamed the first time.
    assert first == last == 1 and anew in ((2, 3) if what in ("dies", "segfault") else (3,))
    assert rollouts[0].ids[0:5] == rollouts[1].ids[0:5]


@pytest.mark.long
@pytest.mark.parametrize("what", ["raises", "dies", "segfault", "exits", "hangs", "talks"])
def test_one_that_fails_always_is_left_out_with_its_own_words(file, tmp_path, what):
    rollouts = play_faults(file, tmp_path, what, times=9, retries=1)
    assert [rollout.finish for rollout in rollouts] == ["stop", "failed", "stop"]
    problem = rollouts[1].episode.problem
    words = {"raises": "the database is gone", "talks": "too much", "hangs": "1 s", "segfault": "SIGSEGV"}
    assert words.get(what, "") in problem and "\n" not in problem, problem
