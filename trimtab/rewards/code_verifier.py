"""The verifier `code`: the share of a label's tests that the answer's program passes.

    ["assert add(1, 2) == 3", ...]                    MBPP's tests; {"test_list": [...], "test_setup_code": ...} too
    [{"input": "1 2\\n", "output": "3\\n"}, ...]      standard input and output
    {"inputs": [...], "outputs": [...]}               APPS and TACO; with fn_name, arguments and results of calls

A label is such a list or object, or its JSON. The program is the last fenced code block of the answer, or the whole
answer, in Python with the standard library. It runs in jails (sandbox/jail.py) and never sees its tests: standard
output is compared here, token by token, and asserts are evaluated here, where the program's functions are stand-ins
that send arguments to the jail and get plain data back. So a program can neither exit before its tests, nor print that
they passed, nor return an object that equals everything. Arguments and results are plain data or the program's own
objects; a test that passes a function of its own, or looks at what a call made of an argument, fails.

Like math_verifier.py this file runs in worker processes.
"""

import ast
import builtins
import importlib
import json
import math
import re
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trimtab.rewards.types import BadSample
from trimtab.sandbox import program_server
from trimtab.sandbox.jail import JailedProgram, ProgramLimits
from trimtab.sandbox.program_server import decode, encode

FENCE = re.compile(r"```[^\n`]*\n(.*?)(?:^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE)
SURROGATE = re.compile("[\ud800-\udfff]")
CALL = """
from math import inf, nan
try:
    call = Solution().{name}
except (NameError, AttributeError):
    call = {name}
result = json.loads(json.dumps(call(*{given!r})))
assert result == {expected!r} or [result] == {expected!r}
"""  # a result is compared as JSON, which has no tuples; APPS wraps some in a list
ANSWER_SECONDS = 30.0  # for all tests of an answer


@dataclass(frozen=True)
class StreamTest:
    given: str
    expected: str


@dataclass(frozen=True)
class AssertTest:
    code: str


CodeTest = StreamTest | AssertTest


def compute_score(data_source: Any, solution_str: str, ground_truth: Any, extra_info: Any = None) -> float:
    return score_program(program_of(solution_str), read_tests(ground_truth))


def program_of(answer: str) -> str:
    """The last fenced code block, or the whole answer."""
    *_, program = [answer, *FENCE.findall(answer)]
    return program


# ---- labels


def read_tests(label: Any) -> list[CodeTest]:
    """The tests of a label. BadSample: it is of none of the forms above."""
    if isinstance(label, str):
        try:
            label = json.loads(label)
        except (ValueError, RecursionError):
            raise BadSample(f"the label is not JSON: {label!r:.80}") from None
    if isinstance(label, dict):
        label = list(_of_columns(label))
    if not isinstance(label, list) or not label:
        raise BadSample(f"the label is no list of tests: {label!r:.80}")
    return [_read_test(test) for test in label]


def _of_columns(label: dict[str, Any]) -> Iterator[Any]:
    if isinstance(tests := label.get("test_list"), list):
        setup: list[str] = []
        for name in ("test_imports", "test_setup_code"):
            lines = label.get(name) or []
            lines = [lines] if isinstance(lines, str) else lines
            if not isinstance(lines, list) or not all(isinstance(line, str) for line in lines):
                raise BadSample(f"{name} of the label is neither a text nor a list of texts: {lines!r:.80}")
            setup += lines
        yield from ("\n".join([*setup, str(test)]) for test in tests)
        return
    inputs, outputs, function = label.get("inputs"), label.get("outputs"), label.get("fn_name")
    if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
        raise BadSample(f"the label has neither test_list nor inputs with as many outputs: {label!r:.80}")
    for given, expected in zip(inputs, outputs):
        if function:
            yield CALL.format(name=function, given=given, expected=expected)
        else:
            yield {"input": given, "output": expected}


def _read_test(test: Any) -> CodeTest:
    if isinstance(test, dict) and {"input", "output"} <= test.keys():
        given, expected = (
            "\n".join(map(str, x)) if isinstance(x, list) else x for x in (test["input"], test["output"])
        )
        if isinstance(given, str) and isinstance(expected, str):
            if SURROGATE.search(given + expected):
                raise BadSample(f"a test of the label has half a surrogate pair, which is no character: {test!r:.80}")
            return StreamTest(given, expected)
    elif isinstance(test, str):
        try:
            tree = ast.parse(test)
        except (SyntaxError, ValueError, RecursionError):
            raise BadSample(f"a test of the label is not Python: {test!r:.80}") from None
        if any(isinstance(node, ast.Assert) for node in ast.walk(tree)):
            return AssertTest(test)
        raise BadSample(f"a test of the label asserts nothing: {test!r:.80}")
    raise BadSample(f"a test of the label is neither an assert nor an object with input and output: {test!r:.80}")


# ---- running


LIMITS = ProgramLimits()


def score_program(
    program: str, tests: list[CodeTest], limits: ProgramLimits = LIMITS, seconds: float = ANSWER_SECONDS
) -> float:
    """The share of tests that pass; those for which no time is left fail."""
    deadline = time.monotonic() + seconds
    asserts = [test.code for test in tests if isinstance(test, AssertTest)]
    names, together = _names(asserts), replace(limits, processor_seconds=limits.processor_seconds * len(asserts))
    passed, module = 0, None
    try:
        for test in tests:
            left = min(limits.seconds, deadline - time.monotonic())
            if left <= 0:
                break
            if isinstance(test, StreamTest):
                now = replace(limits, seconds=left, output_bytes=max(limits.output_bytes, 4 * len(test.expected)))
                with _jailed(program, now, stdin=test.given.encode()) as process:
                    passed += _same_output(process.output(), test.expected)
                continue
            if module is None or not module.alive:  # a program that a test has ended is started again
                module = RemoteModule(program, names, together, left)
            if not module.names:
                break
            passed += module.passes(test.code, left)
    finally:
        if module is not None:
            module.close()
    return passed / len(tests)


def _jailed(code: str, limits: ProgramLimits, **how: Any) -> JailedProgram:
    """A failure to build the jail is tried once more: the system may have been out of processes or memory."""
    try:
        return JailedProgram(code, limits, **how)
    except OSError:
        time.sleep(0.2)
        return JailedProgram(code, limits, **how)


def _names(codes: Sequence[str]) -> list[str]:
    found = [node.id for code in codes for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Name)]
    return list(dict.fromkeys(found))


def _modules(code: str) -> set[str]:
    """Modules of the standard library that a test uses without importing them. A name that is called is the program's:
    no module can be, though some are named like functions."""
    nodes = list(ast.walk(ast.parse(code)))
    found = {n.value.id for n in nodes if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name)}
    called = {n.func.id for n in nodes if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)}
    bound = {n.id for n in nodes if isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Load)}
    bound |= {n.arg for n in nodes if isinstance(n, ast.arg)}
    return found & sys.stdlib_module_names - called - bound - {"this", "antigravity"}  # which do more than define


def _same_output(printed: bytes | None, expected: str) -> bool:
    if printed is None:
        return False
    found, wanted = printed.decode(errors="replace").split(), expected.split()
    return len(found) == len(wanted) and all(map(_same_token, found, wanted))


def _same_token(found: str, wanted: str) -> bool:
    if found == wanted or "." not in wanted:
        return found == wanted
    try:
        return math.isclose(float(found), float(wanted), rel_tol=1e-6, abs_tol=1e-9)
    except ValueError:
        return False


class ProgramEnded(Exception):
    """The program has ended, took too long or sent something else than a reply."""


class RemoteModule:
    """The names that a program defines, as stand-ins: plain data, or references to objects in the jail."""

    def __init__(self, program: str, names: list[str], limits: ProgramLimits, seconds: float):
        self.alive, self._received = True, b""
        self._longest = limits.output_bytes
        self._process = _jailed(Path(program_server.__file__).read_text(), limits, channel=True)
        self._deadline = time.monotonic() + seconds
        self.names: dict[str, Any] = {}
        try:
            found = self.request(source=program, names=names)
            self.names = {name: self.decoded(found[name]) for name in names if name in found}
        except Exception:
            self.names = {}  # none is defined, so that no test passes

    def passes(self, code: str, seconds: float) -> bool:
        """Whether a test runs to its end, in a new namespace."""
        self._deadline = time.monotonic() + seconds
        used = [name for name in _names([code]) if name in self.names]
        # A program may define `sum` and its tests call it, but not `set` for tests of another function.
        own = [name for name in used if not hasattr(builtins, name)] or used
        try:
            modules = {name: importlib.import_module(name) for name in _modules(code)}
            space = {"__name__": "tests"} | {name: self.names[name] for name in own} | modules
            exec(compile(code, "test", "exec"), space)
        except BaseException:
            return False
        return self.alive  # a test may catch what ended the program

    def request(self, **message: Any) -> Any:
        """The reply of the jail; raises the program's exception, or ProgramEnded."""
        try:
            self._process.socket.settimeout(max(0.001, self._deadline - time.monotonic()))
            self._process.socket.sendall(json.dumps(message).encode() + b"\n")
            reply = json.loads(self._line())
            if not isinstance(reply, dict):
                raise ProgramEnded
        except (OSError, ValueError, RecursionError, ProgramEnded) as error:
            self.close()
            raise ProgramEnded from error
        if "error" in reply:
            kind = getattr(builtins, str(reply["error"]), None)
            raise kind if isinstance(kind, type) and issubclass(kind, Exception) else RuntimeError
        return reply.get("value")

    def decoded(self, value: Any) -> Any:
        return decode(value, lambda number: RemoteObject(self, number))

    def close(self) -> None:
        self.alive = False
        self._process.close()

    def _line(self) -> bytes:
        while b"\n" not in self._received and len(self._received) <= self._longest:
            part = self._process.socket.recv(2**16)
            if not part or time.monotonic() > self._deadline:
                raise ProgramEnded
            self._received += part
        line, end, self._received = self._received.partition(b"\n")
        if not end:
            raise ProgramEnded
        return line


class RemoteObject:
    """A function, class or other object of the program. It equals nothing but itself."""

    def __init__(self, module: RemoteModule, number: int):
        self._module, self._number = module, number

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        given = [encode(one, self._refer) for one in arguments]
        others = {name: encode(one, self._refer) for name, one in named.items()}
        return self._module.decoded(self._module.request(object=self._number, arguments=given, named=others))

    def __getattr__(self, name: str) -> Any:
        if name == "tolist" or name.startswith("_"):
            raise AttributeError(name)
        return self._module.decoded(self._module.request(object=self._number, attribute=name))

    def _refer(self, value: Any) -> int:
        if not isinstance(value, RemoteObject) or value._module is not self._module:
            raise TypeError(f"{type(value).__name__} cannot be given to the program")
        return value._number
