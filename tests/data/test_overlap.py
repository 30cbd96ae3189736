import numpy as np
import pytest

from trimtab.data.dataset import beginnings, count_shared

IDS = np.array([1, 2, 3, 9, 1, 2, 3, 8, 4, 4, 4], dtype=np.int32)


@pytest.mark.parametrize(
    ("marked", "expected"),
    [
        (None, [[1, 2, 3, 9], [1, 2, 3, 8], [4, 4, 4]]),
        ([0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 1], [[1, 2, 3], [1, 2, 3], [4, 4]]),
        ([0, 1, 1, 1, 0, 1, 1, 1, 0, 1, 1], [[1, 2, 3, 9], [1, 2, 3, 8], [4, 4, 4]]),  # a text that is all learnt
    ],
)
def test_a_beginning_is_the_prompt_or_a_text_without_one(marked, expected):
    found = beginnings(IDS, np.array([0, 4, 8, 11]), None if marked is None else np.array(marked, dtype=bool))
    assert [np.frombuffer(part, dtype=np.int32).tolist() for part in found] == expected


def test_the_sides_of_a_pair_count_once():
    assert len(list(beginnings(IDS[:8], np.array([0, 2, 4, 6, 8]), every=2))) == 2


def test_every_row_of_the_evaluation_that_is_trained_on_counts():
    assert count_shared(iter([b"a", b"b", b"b"]), iter([b"b", b"b", b"c"])) == 2
