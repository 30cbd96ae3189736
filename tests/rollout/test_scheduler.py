import random

import numpy as np

from trimtab.rollout.builtin.scheduler import GrowingArray


def test_a_column_is_a_list_that_grows_and_is_cut_once():
    draw = random.Random(0)
    column, expected = GrowingArray(np.int32, [3, 4]), [3, 4]
    for _ in range(50):
        values = [draw.randrange(1000) for _ in range(draw.randrange(1, 40))]
        column.extend(np.array([*values, 7], dtype=np.int32), len(values) + 1)
        expected += [*values, 7]
        assert column.array.tolist() == expected and len(column) == column.count == len(expected)
        assert column[-1] == column.last == 7 and column[0] == 3
    column.cut(11)
    assert column.array.tolist() == expected[:11] and column.array.dtype == np.int32


def test_what_was_read_of_a_column_stays_as_it_was():
    column = GrowingArray(np.float32, [1.5])
    read = column.array
    column.extend(np.arange(200, dtype=np.float32), 200)
    before = column.array
    column.cut(3)
    column.extend(np.full(150, -1, dtype=np.float32), 150)
    assert read.tolist() == [1.5] and before.tolist() == [1.5, *range(200)]
