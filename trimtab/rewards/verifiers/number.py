"""Number match, for GSM8K and its like: 1 if the response ends in the number that the label does, else 0.

The number is the first one after the last `####`, or else in the last \\boxed{}, or else in the last <answer>, or else
the last one in the text. Digits are 0 to 9: digits of other scripts and superscripts are no digits here.
"""

import re
from decimal import Decimal
from typing import Any

from trimtab.rewards.verifiers.tags import last_answer

WHOLE = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)"
# A minus after a digit, a letter or a bracket is a subtraction.
NUMBER = re.compile(rf"(?:(?<![0-9A-Za-z)])-)?(?:{WHOLE}(?:\.[0-9]+)?|\.[0-9]+)")
MARK, BOX = "####", "\\boxed{"


def score(prompt: str, response: str, label: Any) -> float:
    truth = final_number(str(label))
    return float(truth is not None and final_number(response) == truth)


def final_number(text: str) -> Decimal | None:
    """The number that a text gives as its answer. Exact, however many digits it has."""
    for mark in (MARK, BOX):
        if mark in text:
            found = NUMBER.search(text, text.rfind(mark) + len(mark))
            break
    else:
        answer = last_answer(text)
        *_, found = [None, *NUMBER.finditer(text if answer is None else answer)]
    return Decimal(found.group().replace(",", "")) if found else None
