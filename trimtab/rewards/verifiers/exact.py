"""Exact match: 1 if the answer is the label, character for character, else 0.

The answer is what stands in the last <answer> tag, or the whole response. Blanks at the ends and their number within do
not count.
"""

from typing import Any

from trimtab.rewards.verifiers.tags import last_answer


def score(prompt: str, response: str, label: Any) -> float:
    answer = last_answer(response)
    return float((response if answer is None else answer).split() == str(label).split())
