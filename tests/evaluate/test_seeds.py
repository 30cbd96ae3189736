import numpy as np
import pytest

from trimtab.evaluate.tail_risk import bootstrap_mean, t_intervals, t_quantile


# Printed tables of Student's distribution.
@pytest.mark.parametrize(
    "degrees, expected", [(1, 12.7062), (2, 4.3027), (4, 2.7764), (9, 2.2622), (30, 2.0423), (1000, 1.9623)]
)
def test_quantiles_are_those_of_the_tables(degrees, expected):
    assert t_quantile(0.975, degrees) == pytest.approx(expected, abs=2e-4)
    assert t_quantile(0.5, degrees) == pytest.approx(0, abs=1e-6)


def test_the_t_interval_holds_the_mean_as_often_as_it_says():
    drawn = np.random.default_rng(0).normal(3, 2, (5, 20_000))
    centre, margin = t_intervals(drawn)
    assert np.mean(np.abs(centre - 3) < margin) == pytest.approx(0.95, abs=0.01)


def test_one_seed_has_a_mean_and_no_width():
    centre, margin = t_intervals(np.array([[1.0, 2.0]]))
    assert centre.tolist() == [1.0, 2.0] and margin.tolist() == [0.0, 0.0]
    assert bootstrap_mean([4.0]).low == bootstrap_mean([4.0]).high == 4.0


def test_the_bootstrap_is_the_exact_distribution_of_two_seeds():
    found = bootstrap_mean([0.0, 1.0])  # the mean of two draws is 0, 1/2 or 1 with 1/4, 1/2, 1/4
    assert (found.value, found.low, found.high) == (0.5, 0.0, 1.0)
    assert bootstrap_mean([0.1, 0.4, 0.2]) == bootstrap_mean([0.1, 0.4, 0.2])
