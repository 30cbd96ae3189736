"""Both ends of a recorded decode step, as kernels, against the same in plain torch."""

import pytest
import torch

from tests.rollout.kernel_device import DEVICE
from trimtab.rollout.builtin.cuda_graphs import COLUMNS
from trimtab.rollout.builtin.kernels.decode_step import advance_step, decode_inputs


def table_of(rows, pages, page_size):
    """Some rows have drawn what they may."""
    generator = torch.Generator().manual_seed(rows)
    table = torch.randint(1, 40, (rows, COLUMNS + pages), generator=generator)
    table[:, 1] %= pages * page_size
    return table.to(DEVICE)


def test_a_step_begins_with_what_the_table_says():
    page_size, table = 4, table_of(7, 5, 4)
    generator = torch.Generator().manual_seed(1)
    embedding = torch.randn(40, 24, generator=generator).to(DEVICE)
    angles = tuple(torch.randn(20, 6, generator=generator).to(DEVICE) for _ in range(2))
    found = decode_inputs(table, COLUMNS, page_size, embedding, angles)
    over = table[:, 2] >= table[:, 4]
    assert 0 < over.sum() < len(table)
    positions = table[:, 1].masked_fill(over, 0)
    pages = table[:, COLUMNS:].gather(1, (positions // page_size)[:, None])[:, 0].masked_fill(over, 0)
    assert torch.equal(found.stream_BD, embedding[table[:, 0]])
    assert all(torch.equal(a, b[positions]) for a, b in zip(found.angles, angles))
    assert torch.equal(found.slot_mapping_B, pages * page_size + positions % page_size)
    assert torch.equal(found.lengths_B, positions + 1)


def own_stops(rows):
    """Each row's own, and some have fewer."""
    return torch.tensor([[row % 13, -1] if row % 3 else [2, (row + 1) % 13] for row in range(rows)])


@pytest.mark.parametrize("stops", [[], [3, 11], None], ids=["none", "two", "each row's own"])
@pytest.mark.parametrize("rows, plain", [(5, False), (1100, True)])
def test_what_was_drawn_is_kept_and_moves_the_table_on(rows, plain, stops):
    table, slots = table_of(rows, 3, 4), rows + 2
    tokens = torch.arange(rows, device=DEVICE) % 13
    log_probs, plain_log_probs = torch.rand(2, rows, device=DEVICE)
    kept_tokens = torch.zeros(4, slots, dtype=torch.int64, device=DEVICE)
    kept_log_probs = torch.zeros(1 + plain, 4, slots, device=DEVICE)
    step = torch.tensor([2], device=DEVICE)
    stop_tokens = own_stops(rows) if stops is None else torch.tensor(stops, dtype=torch.int64)
    stop_tokens = stop_tokens.to(DEVICE)
    expected = table.clone()
    expected[:, 0] = tokens
    expected[:, 1:3] += 1
    ended = (tokens[:, None] == stop_tokens).any(1)
    assert stops == [] or ended.sum() > 0
    expected[ended, 4] = 0
    given = (tokens, log_probs, plain_log_probs if plain else None)
    advance_step(table, *given, kept_tokens, kept_log_probs, stop_tokens, step)
    assert torch.equal(table, expected) and step.tolist() == [3]
    assert torch.equal(kept_tokens[2, :rows], tokens) and kept_tokens.count_nonzero() == tokens.count_nonzero()
    assert torch.equal(kept_log_probs[0, 2, :rows], log_probs)
    if plain:
        assert torch.equal(kept_log_probs[1, 2, :rows], plain_log_probs)
