import numpy as np
import pytest

from trimtab.evaluate.report_samples import prompt_and_answer


@pytest.mark.parametrize(
    ("trained", "prompt", "reference"),
    [
        ([0, 0, 1, 1], [0, 1], [2, 3]),
        ([0, 0, 1, 1, 0], [0, 1], [2, 3]),
        ([0, 1, 0, 0, 1, 1], [0, 1, 2, 3], [4, 5]),  # of several turns the last is asked for
        ([0, 1, 1, 1, 1, 1], [0, 1, 2], [3, 4, 5]),  # a text without a prompt goes on from its middle
        ([0, 1], [0], [1]),
    ],
)
def test_a_sequence_is_cut_before_its_last_answer(trained, prompt, reference):
    assert prompt_and_answer(np.arange(len(trained)), np.array(trained, dtype=bool)) == (prompt, reference)
