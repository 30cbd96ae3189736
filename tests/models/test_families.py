"""Every causal family of the installed transformers (make test-families), as the table of docs/models.md says."""

import pytest
import torch
import transformers

from tests.models.families import (
    NAMES,
    PAGE,
    documented,
    log_prob_gap,
    shared_and_cut,
    tiny_policy,
    train,
    traits_of,
    write_data,
)
from tests.models.test_selfcheck import each_alone
from tests.rollout.answers import RecordedOperations, decode_without_host, ids_of
from tests.samples import batch_of
from trimtab.rollout.builtin import cuda_graphs
from trimtab.rollout.builtin.engine import BuiltinEngine
from trimtab.rollout.sampling import SamplingParams

TODAYS = {"gpt_oss", "llama4_text", "gemma4_text", "qwen3_5_text", "qwen3_next", "nemotron_h", "kimi_linear", "lfm2"}


def test_todays_families_are_packed():
    table = documented()
    assert set(table) >= TODAYS
    assert not {name for name in TODAYS if table[name].rows != "packed"}


def test_every_family_is_documented():
    if f"transformers {'.'.join(transformers.__version__.split('.')[:2])}" not in PAGE.read_text():
        pytest.skip("the page is of another version of transformers")
    assert set(documented()) == set(NAMES)


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_a_family_runs_as_documented(name):
    """Log-probs and gradients of packed or padded rows are transformers', and sampled log-probs the trainer's."""
    policy, batch = tiny_policy(name), batch_of([12, 3, 11, 7])
    if name in documented():  # a later version of transformers knows more
        assert traits_of(policy).items() <= vars(documented()[name]).items(), policy.not_packed
    assert log_prob_gap(policy) < 2e-5
    weights = [weight for weight in policy.parameters() if weight.requires_grad]
    ours = policy(batch).log_probs_N
    found = torch.autograd.grad(ours.square().sum(), weights, allow_unused=True)
    theirs = each_alone(policy.inner, batch)
    expected = torch.autograd.grad(theirs.square().sum(), weights, allow_unused=True)
    torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-5)
    for own, other in zip(found, expected, strict=True):
        if other is not None and other.abs().max() > 0:
            assert own is not None and (own - other).abs().max() <= 2e-3 * other.abs().max() + 1e-6


HOST = {"longcat_flash", "jetmoe"}  # their experts are called one by one, by lists of the host


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name, traits in documented().items() if traits.rows == "packed"])
def test_decode_steps_of_a_family_need_nothing_from_the_host(name, monkeypatch):
    """So that they can be captured as graphs, and sample what eager steps do."""
    if name not in NAMES or name in HOST:
        pytest.skip("an earlier version of transformers lacks it, or it cannot")
    decode_without_host(monkeypatch)
    policy, sampling = tiny_policy(name), SamplingParams(max_new_tokens=6)
    expected = BuiltinEngine(policy, eager=True).generate([[5, 6, 7], [8, 9]], sampling, seeds=[0, 1])
    monkeypatch.setattr(cuda_graphs, "has_graphs", lambda device: True)
    monkeypatch.setattr(cuda_graphs, "capture_graph", RecordedOperations)
    engine = BuiltinEngine(policy, max_num_seqs=4)
    found = engine.generate([[5, 6, 7], [8, 9]], sampling, seeds=[0, 1])
    assert engine.captured.possible and ids_of(found) == ids_of(expected)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    write_data(folder)
    return folder


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_a_family_learns_by_every_job_and_resumes(name, data, tmp_path):
    adapted = train(name, tmp_path, data)
    assert name not in documented() or adapted == documented()[name].lora


@pytest.mark.long
def test_two_processes_share_rows_and_cut_layers_as_documented():
    known = {name: traits for name, traits in documented().items() if name in NAMES}  # an earlier version knows fewer
    said = {name: (traits.ring == "yes", traits.tensor == "yes") for name, traits in known.items()}
    assert shared_and_cut(list(said)) == said
