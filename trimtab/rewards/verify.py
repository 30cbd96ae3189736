"""Built-in verifiers by name, alone or summed with weights: `gsm8k:1.0,format:0.2`, `regex(^Yes),length(20-400):0.1`.

A verifier is a file of verifiers/ with a function score(prompt, response, label) and, where it takes an argument, a
function read_argument(text).
"""

import importlib
import re
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from trimtab.errors import UserError
from trimtab.processes.waiting import Waiting
from trimtab.rewards import verifiers
from trimtab.rewards.functions import FunctionReward
from trimtab.rewards.types import BadSample, Reward, RewardRequest, RewardResult
from trimtab.rewards.weighing import Weighted

SECONDS, MEMORY_GIB = 10.0, 4.0  # of mathematics, for one answer


@dataclass(frozen=True)
class Kind:
    module: str
    needs_label: bool = True
    argument: str = "none"
    """none, optional or required."""


KINDS = {
    "gsm8k": Kind("number"),
    "number": Kind("number"),
    "math": Kind("mathematics"),
    "exact": Kind("exact"),
    "regex": Kind("pattern", argument="optional"),
    "format": Kind("format", needs_label=False),
    "kk": Kind("knights"),
    "length": Kind("length", needs_label=False, argument="required"),
}


class Verifier:
    """One of the pure functions of verifiers/, as a reward."""

    concurrent = True

    def __init__(self, name: str, argument: str | None = None):
        self.name = name
        self._module = importlib.import_module(f"trimtab.rewards.verifiers.{KINDS[name].module}")
        self._arguments = () if argument is None else (self._module.read_argument(argument),)
        self._needs_label = _compares(name, argument)

    def __str__(self) -> str:
        return f"verifier {self.name}"

    def __call__(self, request: RewardRequest) -> RewardResult:
        return RewardResult([self._score(request, row) for row in range(len(request))])

    def close(self) -> None:
        pass

    def _score(self, request: RewardRequest, row: int) -> float:
        label = request.truth(row)
        if label is None and self._needs_label:
            raise BadSample(f"{self.name}: row {row} has no label; name the column that holds it (--label_key)", row)
        try:
            return self._module.score(request.prompts[row], request.responses[row], label, *self._arguments)
        except BadSample as error:
            raise BadSample(f"{self.name}: row {row}: {error}", row) from error


def needing_labels(text: str | None) -> list[str]:
    """The verifiers of a spelling that compare with a label of the data."""
    return [name for name, argument, _ in read_spelling(text) if _compares(name, argument)] if text else []


def _compares(name: str, argument: str | None) -> bool:
    return KINDS[name].needs_label and argument is None


def make_verifier(text: str, waiting: Waiting | None = None) -> Weighted:
    """The weighted sum that `text` spells."""
    return Weighted([(_make(name, argument, waiting), weight) for name, argument, weight in read_spelling(text)])


def _make(name: str, argument: str | None, waiting: Waiting | None) -> Reward:
    if name != "math":
        return Verifier(name, argument)
    if find_spec("math_verify") is None:
        raise UserError("the verifier math needs the package math-verify: pip install 'trimtab[math]'")
    file = Path(verifiers.__file__).with_name("mathematics.py")
    reward = FunctionReward(str(file), seconds=SECONDS, memory_gib=MEMORY_GIB, stuck_reward=0.0, waiting=waiting)
    reward.name = name
    return reward


NAME = re.compile(r"\s*([A-Za-z0-9_]+)")
WEIGHT = re.compile(r"\s*(?::\s*([^,]*?)\s*)?(?:,|$)")


def read_spelling(text: str) -> list[tuple[str, str | None, float]]:
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
        parts.append((name, argument, _weight(text, found.group(1))))
        _check(text, name, argument)
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


def _weight(text: str, word: str | None) -> float:
    try:
        return 1.0 if word is None else float(word)
    except ValueError:
        raise _misspelt(text, f"the weight {word!r} is not a number") from None


def _check(text: str, name: str, argument: Any) -> None:
    if name not in KINDS:
        raise _misspelt(text, f"there is no verifier {name}; there are {', '.join(KINDS)}")
    wanted = KINDS[name].argument
    if wanted == "required" and argument is None:
        raise _misspelt(text, f"{name} needs an argument in brackets")
    if wanted == "none" and argument is not None:
        raise _misspelt(text, f"{name} takes no argument")


def _misspelt(text: str, reason: str) -> UserError:
    return UserError(f"--reward_verifier {text}: {reason}")
