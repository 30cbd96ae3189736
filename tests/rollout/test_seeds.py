"""Every request draws from a stream of its own; runs are resumed by it, so its numbers stay what they are."""

import pytest

from trimtab.rollout.sampling import request_seed


@pytest.mark.parametrize(
    "seed, request_number, expected",
    [(0, 0, 8841707400507832957), (42, 7, 3422949151222215498), (-5, 123456789, 2211324015650395779)],
)
def test_seeds_are_what_they_were(seed, request_number, expected):
    assert request_seed(seed, request_number) == expected


def test_seeds_differ_and_fit_a_tensor_of_integers():
    seeds = {request_seed(seed, request) for seed in range(20) for request in range(50)}
    assert len(seeds) == 1000 and -(2**63) <= min(seeds) < 0 < max(seeds) < 2**63
