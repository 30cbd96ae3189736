"""Engines apart on Ray."""

from functools import partial

import pytest

from tests import warm
from tests.cluster.engines_apart import ON_RAY, build_engines_apart, without_vllm
from tests.train.rl import rl_run


@pytest.fixture
def apart(cluster):
    """Workers build engines that take their time."""
    yield lambda seconds: cluster.workers.prepare(partial(build_engines_apart, seconds))
    cluster.workers.prepare(None)


@pytest.mark.long
def test_they_answer_from_the_weights_that_are_sent_to_them(cluster, folder, apart, tmp_path):
    apart(0.0)
    words = rl_run.arguments(folder, tmp_path, "grpo", ON_RAY, "--max_steps 2 --eval_steps -1")
    warm.output(words, environment=cluster.environment, prepare=without_vllm)
    found = rl_run.rows(tmp_path)
    assert found[-1]["step"] == 2 and found[-1]["log_prob_gap"] < 1e-5 and found[-1]["policy_kl"] > 0
