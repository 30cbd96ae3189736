"""Rows that an environment brings: to learn from, and others to measure with."""

from types import SimpleNamespace

import pytest

from trimtab.config.rl_jobs import GRPOOptions
from trimtab.errors import UserError
from trimtab.server import environment_factory as environment_engine

OPTIONS = GRPOOptions(environment="verifiers:a_module", env_rows=6)


class Five:
    """Five rows in an order that the seed makes."""

    def __init__(self, fixed):
        self.info, self.closed = SimpleNamespace(offers_rows=True, fixed=fixed), False

    def rows(self, count, seed):
        return [{"prompt": f"{(seed + place) % 5}"} for place in range(5)][:count]

    def close(self):
        self.closed = True


@pytest.fixture
def rows_of(monkeypatch):
    def ask(count, to_measure, *, fixed=True):
        pool = Five(fixed)
        monkeypatch.setattr(environment_engine, "open_pool", lambda options: pool)
        try:
            found = environment_engine.environment_rows(
                OPTIONS, count, 7, eval_count=to_measure, instead="--prompt_data"
            )
        finally:
            assert pool.closed
        return {what: rows["prompt"] for what, rows in found.items()}

    return ask


def test_rows_of_a_data_set_to_measure_with_are_held_out_of_it(rows_of):
    assert rows_of(3, 0) == {"train": ["2", "3", "4"]}
    assert rows_of(3, 2) == {"train": ["2", "3", "4"], "evaluation": ["0", "1"]}
    assert rows_of(6, 2) == {"train": ["2", "3", "4"], "evaluation": ["0", "1"]}, "it has no more"
    with pytest.raises(UserError, match="--env_eval_rows 5: --environment verifiers:a_module has 5 rows"):
        rows_of(6, 5)


def test_rows_that_a_seed_makes_are_of_another_one_to_measure_with(rows_of):
    assert rows_of(5, 2, fixed=False) == {"train": ["2", "3", "4", "0", "1"], "evaluation": ["0", "1"]}
