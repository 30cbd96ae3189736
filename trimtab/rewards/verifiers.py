"""Built-in verifiers by name, alone or summed with weights: `gsm8k:1.0,format:0.2`, `regex(^Yes),length(20-400):0.1`.

A verifier is a function score(prompt, response, label) and an entry of VERIFIERS. One that takes an argument also has a
function that parses it; the score function then gets the argument after the label. `math` and `code` run in worker
processes (math_verifier.py, code_verifier.py).
"""

import contextlib
import functools
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from decimal import Decimal
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import regex

from trimtab.errors import UserError
from trimtab.rewards.functions import FunctionReward
from trimtab.rewards.types import BadSample, Reward, RewardRequest, RewardResult, WeightedReward
from trimtab.sandbox.process import Waiter

# ---- tags <think> and <answer>, found without regular expressions: linear in any text

THINK = "<think>"
TAGS = (THINK, "</think>", "<answer>", "</answer>")


def tags_in_order(text: str) -> bool:
    """Whether each of the four tags occurs in the text exactly once, and in their order."""
    places = [text.find(tag) for tag in TAGS]
    return all(text.count(tag) == 1 for tag in TAGS) and places == sorted(places)


def last_answer(text: str) -> str | None:
    """The text of the last <answer> that is closed."""
    end = text.rfind("</answer>")
    start = text.rfind("<answer>", 0, end) if end >= 0 else -1
    return text[start + len("<answer>") : end].strip() if start >= 0 else None


def score_format(prompt: str, response: str, label: Any) -> float:
    """1 if <think>, </think>, <answer> and </answer> each occur once and in this order, else 0.

    A prompt that ends with <think> has opened it for the response.
    """
    return float(tags_in_order(THINK + response if prompt.rstrip().endswith(THINK) else response))


def score_exact(prompt: str, response: str, label: Any) -> float:
    """1 if the answer is the label, character for character, else 0.

    The answer is the last <answer> tag's text, or the whole response. White space at the ends and its amount within do
    not count.
    """
    answer = last_answer(response)
    return float((response if answer is None else answer).split() == str(label).split())


# ---- numbers

WHOLE = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)"
# A minus after a digit, a letter or a bracket is a subtraction.
NUMBER = re.compile(rf"(?:(?<![0-9A-Za-z)])-)?(?:{WHOLE}(?:\.[0-9]+)?|\.[0-9]+)")


def score_number(prompt: str, response: str, label: Any) -> float:
    """1 if the response's final number is the label's, else 0: for GSM8K and similar tasks."""
    truth = final_number(str(label))
    return float(truth is not None and final_number(response) == truth)


def final_number(text: str) -> Decimal | None:
    """The number that a text gives as its answer, exact for any number of digits.

    It is the first one after the last `####`, or else in the last \\boxed{}, or else in the last <answer>, or else the
    last one in the text. Digits are 0 to 9: digits of other scripts and superscripts do not count.
    """
    for mark in ("####", "\\boxed{"):
        if mark in text:
            found = NUMBER.search(text, text.rfind(mark) + len(mark))
            break
    else:
        answer = last_answer(text)
        *_, found = [None, *NUMBER.finditer(text if answer is None else answer)]
    return Decimal(found.group().replace(",", "")) if found else None


# ---- knights and knaves, scored as in PaddleNLP's recipe

GOOD_FORMAT, BAD_FORMAT = 1.0, -1.0
RIGHT, WRONG, UNREADABLE = 2.0, -1.5, -2.0
HEADER = "<|im_start|>assistant"
ROLES = re.compile(r"\b(knight|knave)\b", re.IGNORECASE)
SOLUTION = re.compile(r"\b([A-Za-z][\w'-]*)[ \t]+is[ \t]+an?[ \t]+(knight|knave)\b", re.IGNORECASE)


def score_knights(prompt: str, response: str, label: Any) -> float:
    """The score of the format plus that of the answer:

        3     tags in order, every name has the right role
        -0.5  tags in order, every name has a role, but not all are right
        -1    tags in order, an answer that cannot be read
        -3    tags missing, repeated or out of order

    The label is the solution as text, such as "(1) Zoey is a knight\\n(2) Owen is a knave", or a dict that has it under
    solution_text_format.
    """
    text = response if HEADER in response else f"{HEADER}\n<think>{response}"
    if not tags_in_order(text):
        return BAD_FORMAT + UNREADABLE
    truth = knights_solution(label)
    answered = _roles_in(last_answer(text) or "", truth)
    if answered is None:
        return GOOD_FORMAT + UNREADABLE
    return GOOD_FORMAT + (RIGHT if answered == truth else WRONG)


def knights_solution(label: Any) -> dict[str, str]:
    """The role of every name."""
    text = label.get("solution_text_format") if isinstance(label, dict) else label
    found = {name: role.lower() for name, role in SOLUTION.findall(text)} if isinstance(text, str) else {}
    if not found:
        raise BadSample(f"the label is no solution of the form '(1) Zoey is a knight': {label!r:.80}")
    return found


def _roles_in(answer: str, truth: dict[str, str]) -> dict[str, str] | None:
    """The role that the answer gives every name; None where it leaves one out or says more than that."""
    if len(ROLES.findall(answer)) != len(truth):
        return None
    roles = {}
    for name in truth:
        found = re.search(rf"\b{re.escape(name)}\s+is\s+a\s+(knight|knave)\b", answer, re.IGNORECASE)
        if found is None:
            return None
        roles[name] = found.group(1).lower()
    return roles


# ---- regular expressions

SEARCH_SECONDS = 1.0
"""A search that takes longer counts as not found: on some patterns and answers backtracking would take forever."""


def score_regex(prompt: str, response: str, label: Any, pattern: str | None = None) -> float:
    """1 if the pattern is found in the response, else 0. Without an argument the row's label is the pattern."""
    try:
        compiled = _compiled(str(label) if pattern is None else pattern)
        return float(compiled.search(response, timeout=SEARCH_SECONDS) is not None)
    except TimeoutError:
        return 0.0
    except regex.error as error:
        raise BadSample(f"the label {label!r} is not a regular expression ({error})") from error


def read_pattern(text: str) -> str:
    try:
        _compiled(text)
    except regex.error as error:
        raise UserError(f"regex({text}): not a regular expression ({error})") from error
    return text


@functools.lru_cache(4096)
def _compiled(pattern: str) -> regex.Pattern:
    return regex.compile(pattern, regex.DOTALL)


# ---- length


def score_length(prompt: str, response: str, label: Any, bounds: tuple[int, int]) -> float:
    """1 while the response has at least LOW and at most HIGH characters.

    Beyond, it falls to 0 at half of LOW and at twice HIGH. Written length(HIGH) or length(LOW-HIGH).
    """
    low, high = bounds
    size = len(response)
    if size > high:
        return max(0.0, 2 - size / high)
    return 1.0 if size >= low else max(0.0, 2 * size / low - 1)


def read_bounds(text: str) -> tuple[int, int]:
    low, dash, high = text.rpartition("-")
    try:
        bounds = int(low) if dash else 0, int(high)
    except ValueError:
        bounds = (1, 0)
    if not 0 <= bounds[0] <= bounds[1] or bounds[1] < 1:
        raise UserError(f"length({text}): give characters as HIGH or LOW-HIGH, for example length(20-400)")
    return bounds


# ---- verifiers by name


@dataclass(frozen=True)
class VerifierKind:
    score: Callable[..., float] | None
    """None: of NAME_verifier.py, in worker processes."""
    needs_label: bool = True
    argument: str = "none"
    """none, optional or required."""
    read_argument: Callable[[str], Any] | None = None
    answers: tuple[Callable[[str], str], ...] = ()
    """Ways of writing a label as an answer, one of which must have the best score; none: it cannot be so written."""
    best: float = 1.0


def boxed(label: str) -> str:
    truth = label.rpartition("####")[2].strip()
    return truth if "\\boxed" in truth else f"\\boxed{{{truth.strip('$')}}}"


VERIFIERS = {
    "gsm8k": VerifierKind(score_number, answers=(str,)),
    "number": VerifierKind(score_number, answers=(str,)),
    "math": VerifierKind(None, answers=(boxed, str)),
    "code": VerifierKind(None),
    "exact": VerifierKind(score_exact, answers=(str,)),
    "regex": VerifierKind(score_regex, argument="optional", read_argument=read_pattern),
    "format": VerifierKind(score_format, needs_label=False),
    "kk": VerifierKind(score_knights, answers=("</think><answer>{}</answer>".format,), best=GOOD_FORMAT + RIGHT),
    "length": VerifierKind(score_length, needs_label=False, argument="required", read_argument=read_bounds),
}
WORKER_SECONDS = {"math": 10.0, "code": 60.0}  # limits of an answer
WORKER_MEMORY_GIB = 4.0


class VerifierReward:
    """A verifier that is a pure function, as a reward."""

    concurrent = True

    def __init__(self, name: str, argument: str | None = None):
        kind = VERIFIERS[name]
        assert kind.score is not None, "others run in worker processes"
        self.name, self._score = name, kind.score
        self._arguments: tuple[Any, ...] = ()
        if argument is not None:
            assert kind.read_argument is not None, "parse_verifier_spec has refused it"
            self._arguments = (kind.read_argument(argument),)
        self._needs_label = _reads_label(name, argument)

    def __str__(self) -> str:
        return f"verifier {self.name}"

    def __call__(self, request: RewardRequest) -> RewardResult:
        return RewardResult([self._score_row(request, row) for row in range(len(request))])

    def close(self) -> None:
        pass

    def _score_row(self, request: RewardRequest, row: int) -> float:
        label = request.truth(row)
        if label is None and self._needs_label:
            raise BadSample(f"{self.name}: row {row} has no label; name the column that holds it (--label_key)", row)
        try:
            return self._score(request.prompts[row], request.responses[row], label, *self._arguments)
        except BadSample as error:
            raise BadSample(f"{self.name}: row {row}: {error}", row) from error


def verifiers_with_labels(text: str) -> list[str]:
    """The verifiers of a spelling that compare with a label of the data."""
    return [name for name, argument, _ in parse_verifier_spec(text) if _reads_label(name, argument)]


def _reads_label(name: str, argument: str | None) -> bool:
    return VERIFIERS[name].needs_label and argument is None


def score_labels(name: str, request: RewardRequest) -> list[float]:
    """A verifier's scores of the labels themselves, in the way of writing them that it likes best; [] if it cannot be
    tried. BadSample: a label is not of its kind."""
    truths = [request.truth(row) for row in range(len(request))]
    texts = [str(t.get("solution_text_format", t) if isinstance(t, dict) else t) for t in truths]
    with contextlib.closing(_make(name, None, None)) as verifier:
        ways = [replace(request, responses=list(map(write, texts))) for write in VERIFIERS[name].answers]
        return [max(scores) for scores in zip(*(verifier(way).rewards for way in ways))]


def make_verifier(text: str, waiter: Waiter | None = None) -> WeightedReward:
    """The weighted sum that `text` spells."""
    return WeightedReward(
        [(_make(name, argument, waiter), weight) for name, argument, weight in parse_verifier_spec(text)]
    )


def _make(name: str, argument: str | None, waiter: Waiter | None) -> Reward:
    if VERIFIERS[name].score is not None:
        return VerifierReward(name, argument)
    if name == "math" and find_spec("math_verify") is None:
        raise UserError("the verifier math needs the package math-verify: pip install 'trimtab[math]'")
    return WorkerVerifierReward(name, waiter)


class WorkerVerifierReward(FunctionReward):
    """A verifier in worker processes: an answer that exceeds their limits scores 0."""

    def __init__(self, name: str, waiter: Waiter | None):
        self._note = _isolation_line() if name == "code" else ""
        file = Path(__file__).with_name(f"{name}_verifier.py")
        limits: dict[str, Any] = {"seconds": WORKER_SECONDS[name], "memory_gib": WORKER_MEMORY_GIB}
        super().__init__(str(file), **limits, stuck_reward=0.0, waiter=waiter)
        self.name = name

    def __str__(self) -> str:
        return f"verifier {self.name}{self._note}"


def _isolation_line() -> str:
    """What programs are isolated from, asked in another process: this one may have threads, and jails are forks."""
    found = subprocess.run([sys.executable, "-m", "trimtab.sandbox.jail"], capture_output=True, text=True, check=False)
    if found.returncode != 0:
        raise UserError(f"--reward_verifier code: {(found.stderr.strip().splitlines() or ['no jail'])[-1]}")
    return f", programs {found.stdout.strip()}"


NAME = re.compile(r"\s*([A-Za-z0-9_]+)")
WEIGHT = re.compile(r"\s*(?::\s*([^,]*?)\s*)?(?:,|$)")


def parse_verifier_spec(text: str) -> list[tuple[str, str | None, float]]:
    """(name, argument, weight) of each part of NAME[(ARGUMENT)][:WEIGHT],... A bracket of an argument that has no
    partner is written with a backslash."""
    parts: list[tuple[str, str | None, float]] = []
    position = 0
    while position < len(text) or not parts:
        found = NAME.match(text, position)
        if found is None:
            raise _misspelt(text, f"a name is expected at {text[position:]!r}")
        name, argument, position = found.group(1), None, found.end()
        if text[position : position + 1] == "(":
            end = _closing(text, position)
            argument, position = text[position + 1 : end], end + 1
        found = WEIGHT.match(text, position)
        if found is None:
            raise _misspelt(text, f"a comma or :WEIGHT is expected at {text[position:]!r}")
        try:
            weight = 1.0 if found.group(1) is None else float(found.group(1))
        except ValueError:
            raise _misspelt(text, f"the weight {found.group(1)!r} is not a number") from None
        parts.append((name, argument, weight))
        if name not in VERIFIERS:
            raise _misspelt(text, f"there is no verifier {name}; there are {', '.join(VERIFIERS)}")
        if VERIFIERS[name].argument == "required" and argument is None:
            raise _misspelt(text, f"{name} needs an argument in brackets")
        if VERIFIERS[name].argument == "none" and argument is not None:
            raise _misspelt(text, f"{name} takes no argument")
        position = found.end()
    return parts


def _closing(text: str, opening: int) -> int:
    depth, position = 0, opening
    while position < len(text):
        depth += (text[position] == "(") - (text[position] == ")")
        if depth == 0:
            return position
        position += 2 if text[position] == "\\" else 1
    raise _misspelt(text, "a bracket is not closed")


def _misspelt(text: str, reason: str) -> UserError:
    return UserError(f"--reward_verifier {text}: {reason}")
