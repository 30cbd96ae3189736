"""Programs of answers against their tests: what passes in plain Python passes here, and nothing else does."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.rewards.hostile import KINDS, NOTHING_PASSES, programs
from tests.rewards.samples import make_reward_request
from trimtab.rewards import code_verifier
from trimtab.rewards.code_verifier import program_of, read_tests, score_program
from trimtab.rewards.types import BadSample
from trimtab.rewards.verifiers import make_verifier
from trimtab.sandbox import jail
from trimtab.sandbox.jail import ProgramLimits

ADD = ["assert add(1, 2) == 3", "assert add(2, 2) == 4"]
PAIRS = [{"input": "1 2\n", "output": "3\n"}, {"input": "2 2\n", "output": "4"}]


@pytest.fixture(scope="module")
def verifier():
    found = make_verifier("code")
    yield found
    found.close()


def score(verifier, answers, labels):
    return verifier(make_reward_request(answers, labels)).rewards


MBPP = [  # programs, tests, and the share that plain Python says passes
    ("def add(a, b): return a + b", ADD),
    ("def add(a, b): return 3", ADD),
    ("def sum(a, b): return 6", ["assert sum(10, 15) == 6"]),
    ("import math\ndef f(x): return math.sqrt(x)", ["assert math.isclose(f(2), 1.4142, rel_tol=0.001)"]),
    ("def f(s): return set(s)", ["assert f('aab') == {'a', 'b'}", "assert sorted(f('ba')) == ['a', 'b']"]),
    ("def f(a, *, b=1): return {a: (b, None)}", ["assert f(2, b=3) == {2: (3, None)}", "assert f(2)[2][0] == 1"]),
    ("from collections import Counter\ndef f(s): return Counter(s)", ["assert f('aab') == {'a': 2, 'b': 1}"]),
    ("def f(x):\n    yield from x", ["assert list(f([1, 2])) == [1, 2]", "assert f([1]) == [1]"]),
    (
        "class Pair:\n    def __init__(s, a): s.a = a\ndef f(p): return max(x.a for x in p)",
        ["assert f([Pair(2)]) == 2"],
    ),
    ("def f(x): raise ValueError(x)", ["try:\n    f(1)\n    assert False\nexcept ValueError:\n    pass"]),
    ("def f(x): return x / 0", ["assert f(1) == 0", "assert f == f"]),
    ("def f(x): return complex(x, 1), b'x', float('inf')", ["assert f(1) == (1 + 1j, b'x', float('inf'))"]),
    ("x = [1", ["assert True"]),
    ("def tokenize(x): return x.split()", ["assert tokenize('a b') == ['a', 'b']"]),  # named like modules
    ("def f(n): return n", ["for nt in [1, 2]: assert f(nt) == nt", "queue = [3]\nassert f(queue).pop() == 3"]),
    ("def f(n): return n", ["assert f(msvcrt.x) == 1", "assert f(this.s) == 1", "assert f(1) == 1"]),
    ("import math\ndef f(n): return -math.factorial(n)", ["assert f(2000) == -math.factorial(2000)"]),
    ("def f(n): return n % 10", ["assert f(10**5000 + 7) == 7"]),
    ("TABLE = {1: 2}", ["assert TABLE[1] == 2"]),
    ("def f(a): return a", ["def check(c):\n    assert c(3) == 3\n    assert c('é') == 'é'\ncheck(f)"]),
]


def plainly(program: str, tests: list[str]) -> float:
    """The same in one interpreter, for programs that may be trusted."""
    passed = 0
    for test in tests:
        try:
            exec(f"{program}\n{test}", {})
            passed += 1
        except Exception:
            pass
        except SyntaxError:
            return 0.0
    return passed / len(tests)


def test_asserts_pass_as_in_plain_python(verifier):
    found = score(verifier, [program for program, _ in MBPP], [json.dumps(tests) for _, tests in MBPP])
    assert found == [plainly(*case) for case in MBPP]


def test_standard_input_and_output(verifier):
    right = "Sure:\n```python\na, b = map(int, input().split())\nprint(a + b)\n```\nIt adds."
    answers = [right, right.replace("+", "*"), "print(3)", "import sys\nprint(3)\nsys.exit(1)", "print('0.33333331')"]
    labels = [PAIRS, json.dumps(PAIRS), {"inputs": ["1 2", ["2", "2"]], "outputs": ["3", ["4"]]}, PAIRS]
    labels.append([{"input": "", "output": "0.3333333"}])
    assert score(verifier, answers, labels) == [1.0, 0.5, 0.5, 0.0, 1.0]


def test_calls_of_apps(verifier):
    label = {"fn_name": "f", "inputs": [[1, 2], [3, 4]], "outputs": [2, [12]]}
    assert score(verifier, ["def f(a, b): return a * b", "def f(a, b): return 2"], [label] * 2) == [1.0, 0.5]


APPS = {"fn_name": "f", "inputs": [[1, 2], [3, 4]], "outputs": [[2, 1], [[12, 1]]]}


def test_functions_named_like_modules_and_numbers_that_are_infinite(verifier):
    named = {"fn_name": "numbers", "inputs": [[1]], "outputs": [2]}
    infinite = '{"fn_name": "f", "inputs": [[Infinity], [1]], "outputs": [-Infinity, -1]}'
    answers = ["def numbers(a): return 2 * a", "def f(a): return -a"]
    assert score(verifier, answers, [named, infinite]) == [1.0, 1.0]


def test_imports_of_a_label_may_be_a_text(verifier):
    label = {"test_imports": "import math", "test_setup_code": ["x = 4"], "test_list": ["assert f(x) == math.sqrt(x)"]}
    assert score(verifier, ["def f(x): return x ** 0.5"], [label]) == [1.0]


@pytest.mark.parametrize(
    "program, share",
    [
        ("class Solution:\n    def f(self, a, b):\n        return [a * b, 1]", 1.0),
        ("class Solution:\n    pass\ndef f(a, b): return (a * b, 1)", 1.0),
        ("def f(a, b): return (2, 1)", 0.5),
        ("class Solution:\n    def g(self, a, b):\n        return [a * b, 1]", 0.0),
    ],
)
def test_calls_of_methods_and_results_that_are_tuples(verifier, program, share):
    assert score(verifier, [program], [APPS]) == [share]


def test_processor_seconds_are_for_a_test():
    program = "def f():\n    import time\n    t = time.process_time()\n    while time.process_time() < t + 0.6: pass"
    limits = ProgramLimits(processor_seconds=1)
    assert score_program(program, read_tests(["assert f() is None"] * 3), limits) == 1.0


def test_a_jail_that_cannot_be_built_is_no_score(monkeypatch):
    tests, build, failures = read_tests(PAIRS[:1]), code_verifier.JailedProgram, [1]

    def fails_first(*given, **how):
        if failures:
            failures.pop()
            raise OSError("try again")
        return build(*given, **how)

    monkeypatch.setattr(code_verifier, "JailedProgram", fails_first)
    assert score_program("print(3)", tests) == 1.0
    monkeypatch.setattr(jail, "PYTHON", "/no/such/python")
    for found in (tests, read_tests(ADD)):
        with pytest.raises(OSError, match="no jail"):
            score_program("print(3)", found)


def test_the_program_is_the_last_fenced_block_or_the_whole():
    assert program_of("a\n```\nx = 1\n```\nb ```py\nx = 2\n```") == "x = 2\n"
    assert program_of("```python\nx = 1") == "x = 1" and program_of("x = 3") == "x = 3"


@pytest.mark.parametrize(
    "label, words",
    [
        ("assert f(1)", "not JSON"),
        ("[]", "no list of tests"),
        ("3", "no list of tests"),
        ('{"inputs": [1]}', "neither test_list nor inputs"),
        ('{"test_imports": 3, "test_list": ["assert f(1)"]}', "test_imports of the label is neither a text nor a list"),
        ('{"test_setup_code": [3], "test_list": ["assert f(1)"]}', "test_setup_code of the label is neither"),
        ('["f(1)"]', "asserts nothing"),
        ('["assert ("]', "not Python"),
        ('[{"input": "x"}]', "neither an assert nor"),
        ('[{"input": 1, "output": 2}]', "neither an assert nor"),
        ('[{"input": "\\ud800", "output": ""}]', "half a surrogate pair"),
    ],
)
def test_labels_that_are_no_tests(label, words):
    with pytest.raises(BadSample, match=words):
        read_tests(label)


# ---- hostile programs

SWEEP = """
import sys
from tests.rewards.hostile import programs
from trimtab.rewards.code_verifier import read_tests, score_program
from trimtab.sandbox.jail import ProgramLimits
limits = ProgramLimits(processor_seconds=1, seconds=0.6)
for kind, program, label in programs(int(sys.argv[1])):
    print(kind, score_program(program, read_tests(label), limits, 1.0), flush=True)
"""


def alive() -> set[str]:
    """Processes of any user that run a jailed program."""
    found = set()
    for place in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if b"program.py" in place.read_bytes():
                found.add(place.parent.name)
        except OSError:
            continue
    return found


def files() -> set[str]:
    places = [Path.cwd(), Path("/tmp"), Path("/dev/shm"), Path.home(), Path("/")]
    return {str(path) for place in places for path in place.glob("*hostile*")}


@pytest.mark.parametrize("count", [len(KINDS), pytest.param(1000, marks=pytest.mark.long)])
def test_hostile_programs_leave_nothing_behind_and_pass_nothing(count):
    before = files()
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", SWEEP, str(count)]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.split()
    scores = list(zip(found[::2], map(float, found[1::2])))
    assert len(scores) == count == len(list(programs(count)))
    assert [(kind, score) for kind, score in scores if score == 1] == []
    assert [(kind, score) for kind, score in scores if score and kind in NOTHING_PASSES] == []
    left, deadline = alive(), time.monotonic() + 30
    while left & alive() and time.monotonic() < deadline:  # programs of other tests end in time
        time.sleep(0.1)
    assert not left & alive() and files() == before


def test_a_program_that_kills_all_it_can_harms_no_other_answer(verifier):
    answers = ["import os\nos.kill(-1, 9)", "def add(a, b): return a + b", "import os\nos.killpg(0, 9)"]
    assert score(verifier, answers, [ADD] * 3) == [0.0, 1.0, 0.0]
