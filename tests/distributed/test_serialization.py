import json
import math
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, time
from decimal import Decimal
from pathlib import Path

import numpy as np
import pytest
import torch

from trimtab.data.batches import Span, TokenBatch
from trimtab.distributed.serialization import NotSerializable, Serializer
from trimtab.rewards.types import BadSample
from trimtab.rollout.sampling import SamplingParams


@dataclass
class Record:
    ids: list[list[int]]
    column: torch.Tensor
    more: dict[str, torch.Tensor] = field(default_factory=dict)
    other: "Record | None" = None


def there_and_back(value, *records):
    return Serializer(*records).unpack(Serializer(*records).pack(value))


PLAIN = [
    None, True, 0, -1.5, "täxt", [], (), {}, [1, 2.0, "x", None], (1, (2, [3])), {"a": {"b": [1]}}, {1: 2.0, "x": ()},
    list(range(100)), [float(i) for i in range(100)], [True] * 20, [1, True] * 10, [2**70] * 20, [2**63 - 1, *range(9)],
    [[1, 2, 3], [], [4] * 20], [[], []], [[1.5] * 9, [2.5]], [[1] * 9, ["x"]], [[[1] * 9], [[2] * 9]], Path("/a/b"),
    ["{", '"', "\n"], {"tuple": [1], "map": {"error": 2}}, [(1, 2**63), (3, 4)],
    b"", b"\x00\xff{", date(2026, 1, 31), datetime(2026, 1, 31, 12, 30, 1, tzinfo=UTC), time(23, 59), Decimal("1.10"),
]  # fmt: skip


@pytest.mark.parametrize("value", PLAIN, ids=str)
def test_plain_values_arrive_as_they_were(value):
    found = there_and_back(value)
    assert found == value and repr(found) == repr(value)


def test_numbers_that_json_does_not_know_arrive():
    assert math.isnan(there_and_back(math.nan)) and there_and_back([-math.inf]) == [-math.inf]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32, torch.int64, torch.bool, torch.float64])
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 5), (0, 4)])
def test_tensors_and_arrays_arrive_bit_for_bit(dtype, shape):
    tensor = (torch.randn(shape) * 3).to(dtype)
    found = there_and_back(["x", tensor, tensor])
    assert found[1].dtype == dtype and found[1].shape == tensor.shape and torch.equal(found[2], tensor)
    if dtype != torch.bfloat16:
        array = there_and_back(tensor.numpy())
        assert isinstance(array, np.ndarray) and np.array_equal(array, tensor.numpy())


def test_a_view_arrives_without_what_it_is_a_view_of():
    large = torch.arange(1_000_000).reshape(1000, 1000)
    message = Serializer().pack(large[:, 7])
    assert len(message) < 9000 and torch.equal(Serializer().unpack(message), large[:, 7])


@pytest.mark.parametrize("count", [0, 1, 3])
def test_records_arrive_with_all_their_columns(count):
    rows = [
        Record([[i, 2], [3]], torch.randn(4), {"x": torch.randn(i)}, Record([], torch.zeros(i))) for i in range(count)
    ]
    found = there_and_back(rows, Record)
    assert len(found) == count
    for mine, theirs in zip(found, rows):
        assert mine.ids == theirs.ids and torch.equal(mine.column, theirs.column) and mine.other.ids == []
        assert torch.equal(mine.more["x"], theirs.more["x"])


def test_what_roles_are_told_arrives():
    batch = TokenBatch.of([(np.arange(5), np.ones(5, bool)), (np.arange(6), np.ones(6, bool))], [0, 3], a=torch.ones(2))
    batch.weight = 0.0
    first, second = there_and_back([batch, batch], TokenBatch, Span)
    assert first.spans == batch.spans and first.weight == 0.0 and second.beside is None
    assert torch.equal(first.ids_T, batch.ids_T) and torch.equal(second.extra["a"], batch.extra["a"])
    sampling = SamplingParams(stop_token_ids=(1, 2), logit_bias={3: -1.0}, stop_strings=("x",))
    assert there_and_back(sampling, SamplingParams) == sampling


def test_an_exception_arrives_with_what_it_knows():
    found = there_and_back(BadSample("row 3: no", 3), BadSample)
    assert type(found) is BadSample and str(found) == "row 3: no" and found.row == 3


def test_only_the_records_of_a_wire_travel():
    with pytest.raises(NotSerializable, match="Record is not among the types"):
        Serializer(SamplingParams).pack(Record([], torch.zeros(1)))
    with pytest.raises(KeyError):
        Serializer(SamplingParams).unpack(Serializer(Record).pack(Record([], torch.zeros(1))))


def test_a_message_that_lies_about_its_length_is_refused():
    header = json.dumps({"tensor": ["float32", [1000], 0]}).encode()
    message = len(header).to_bytes(8, "little") + header + bytes(64)
    with pytest.raises(AssertionError, match="ends early"):
        Serializer().unpack(message)
