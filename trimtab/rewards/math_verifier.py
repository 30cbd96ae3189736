"""The verifier `math`: 1 if the answer equals the label as an expression, by the package math-verify, else 0.

The package may loop forever on a hostile expression and guards itself by signals, which only a main thread gets. So
this file runs like a user's reward function: in worker processes with limits; an answer that exceeds them scores 0.
"""

from typing import Any

from math_verify import parse, verify

SECONDS = 2  # for each of parsing and comparing


def compute_score(data_source: Any, solution_str: str, ground_truth: Any, extra_info: Any = None) -> float:
    truth = str(ground_truth).rpartition("####")[2].strip()  # GSM8K's labels have their working before it
    marked = "$" in truth or "\\boxed" in truth
    right = parse(truth if marked else f"${truth}$", parsing_timeout=SECONDS)
    return float(verify(right, parse(solution_str, parsing_timeout=SECONDS), timeout_seconds=SECONDS))
