"""Knights and knaves, scored as in PaddleNLP's recipe: format plus answer.

    3     tags in order, every name judged rightly
    -0.5  tags in order, every name judged, but not all rightly
    -1    tags in order, an answer that cannot be read
    -3    tags missing, repeated or out of order

The label is the solution as text, such as "(1) Zoey is a knight\\n(2) Owen is a knave", or a dict that has it under
solution_text_format.
"""

import re
from typing import Any

from trimtab.rewards.types import BadSample
from trimtab.rewards.verifiers.tags import in_order, last_answer

GOOD_FORMAT, BAD_FORMAT = 1.0, -1.0
RIGHT, WRONG, UNREADABLE = 2.0, -1.5, -2.0
HEADER = "<|im_start|>assistant"

ROLES = re.compile(r"\b(knight|knave)\b", re.IGNORECASE)
SOLUTION = re.compile(r"\b([A-Za-z][\w'-]*)[ \t]+is[ \t]+an?[ \t]+(knight|knave)\b", re.IGNORECASE)


def score(prompt: str, response: str, label: Any) -> float:
    text = response if HEADER in response else f"{HEADER}\n<think>{response}"
    if not in_order(text):
        return BAD_FORMAT + UNREADABLE
    truth = solution(label)
    judged = judgement(last_answer(text) or "", truth)
    if judged is None:
        return GOOD_FORMAT + UNREADABLE
    return GOOD_FORMAT + (RIGHT if judged == truth else WRONG)


def solution(label: Any) -> dict[str, str]:
    """Who is what, by name."""
    text = label.get("solution_text_format") if isinstance(label, dict) else label
    found = {name: role.lower() for name, role in SOLUTION.findall(text)} if isinstance(text, str) else {}
    if not found:
        raise BadSample(f"the label is no solution of the form '(1) Zoey is a knight': {label!r:.80}")
    return found


def judgement(answer: str, truth: dict[str, str]) -> dict[str, str] | None:
    """What the answer says of every name, or None where it leaves one out or says more than that."""
    if len(ROLES.findall(answer)) != len(truth):
        return None
    judged = {}
    for name in truth:
        found = re.search(rf"\b{re.escape(name)}\s+is\s+a\s+(knight|knave)\b", answer, re.IGNORECASE)
        if found is None:
            return None
        judged[name] = found.group(1).lower()
    return judged
