"""Format: 1 if <think>, </think>, <answer> and </answer> each occur once and in this order, else 0.

A prompt that ends with <think> has opened it for the response.
"""

from typing import Any

from trimtab.rewards.verifiers.tags import completed, in_order


def score(prompt: str, response: str, label: Any) -> float:
    return float(in_order(completed(prompt, response)))
