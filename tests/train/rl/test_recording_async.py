"""--record of an asynchronous run keeps its batches as they were trained; --replay, without --async_train, makes its
updates again, bit for bit."""

import json
import shutil
import signal
from functools import partial

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests import warm
from tests.train.rl.rl_run import EPISODES, ITERATIONS, PROMPTS, arguments, assert_identical, at, result, rows, weights
from tests.train.rl.test_recording import complaint, recorded_and_replayed
from trimtab.config.rl_jobs import GRPOOptions
from trimtab.train.metrics import read_rows
from trimtab.train.rl.source import prompt_order

# Few places in the engine, so that answers are cut off by updates and go on.
FEW = "--rollout_slots 6"
ASYNC = f"--async_train --async_queue_size 2 {FEW}"


@pytest.fixture(scope="module")
def recorded(folder, tmp_path_factory):
    out = tmp_path_factory.mktemp("recorded")
    assert warm.run(arguments(folder, out, "grpo", ASYNC, f"--record {out}/recording")) == 0
    return out


def trained(out):
    """What two trainings on the same batches agree on, less the groups that only the first had under way."""
    found = result(out)
    found[2].pop("ahead", None)
    return found


def test_the_replay_makes_the_same_updates_and_says_how_it_weighs_tokens(folder, recorded, tmp_path):
    printed = warm.output(arguments(folder, tmp_path, "grpo", FEW, f"--replay {recorded}/recording"))
    assert_identical(trained(tmp_path), trained(recorded))
    correction = "--mismatch_correction tis --mismatch_range 0 2"
    told = f"--replay {recorded}/recording: of an asynchronous run; its tokens are weighed by {correction}"
    assert told in printed.replace("\n", "")
    assert max(row["age_max"] for row in rows(recorded)[1:]) >= 1, "or there was nothing asynchronous in it"
    assert any(row["corrected_share"] > 0 for row in rows(recorded)[1:])
    assert all(row["log_prob_gap_fresh"] < 1e-5 for row in rows(recorded)[1:]), "only older tokens may be off"
    assert max(row["log_prob_gap"] for row in rows(recorded)[1:]) > 1e-3


def test_a_recording_has_the_batches_as_trained_and_the_version_of_every_token(recorded):
    order = prompt_order(PROMPTS, GRPOOptions(), EPISODES)
    ledger = read_rows(recorded / "ledger.jsonl", key="iteration")
    mixed = False
    for iteration in range(ITERATIONS):
        tensors = load_file(recorded / "recording" / f"iteration{iteration + 1:06d}.safetensors")
        line = ledger[iteration]
        expected = [order.step_samples(place)[0] for place in line["trained"] for _ in range(4)]
        assert tensors["rows_S"].tolist() == expected
        versions_N = tensors["versions_N"]
        assert len(versions_N) == len(tensors["sampled_N"])
        assert min(line["versions"]) <= versions_N.min() and versions_N.max() <= iteration
        mixed |= len(versions_N.unique()) > 1
        assert "old_N" not in tensors
    assert mixed, "no answer went on with other weights"


@pytest.mark.short(1)
@pytest.mark.parametrize(
    "words, kind", [("--mismatch_correction None", None), ("--mismatch_correction icepop", "icepop")]
)
def test_a_replay_that_asks_for_another_correction_gets_it(folder, recorded, tmp_path, words, kind):
    assert warm.run(arguments(folder, tmp_path, "grpo", f"--replay {recorded}/recording", words)) == 0
    assert json.loads((tmp_path / "manifest.json").read_text())["settings"].get("mismatch_correction") == kind
    assert any(not torch.equal(tensor, weights(recorded)[name]) for name, tensor in weights(tmp_path).items())


def test_a_recording_that_is_asynchronous_in_part_is_refused(folder, recorded, tmp_path):
    partly = shutil.copytree(recorded / "recording", tmp_path / "recording")
    path = partly / "iteration000003.safetensors"
    with safe_open(path, framework="pt") as file:
        described = json.loads(file.metadata()["iteration"])
    assert described.pop("outliving")["mismatch_correction"] == "tis"
    save_file(load_file(path), path, metadata={"iteration": json.dumps(described)})
    told = complaint(arguments(folder, tmp_path / "out", "grpo", f"--replay {partly} --dry_run"))
    assert "iteration000003.safetensors: it was recorded with other settings of --async_train" in told


@pytest.mark.long
@pytest.mark.parametrize("estimator", ["ppo", "reinforce", "filtered", "lora"])
def test_every_objective_is_replayed_bit_for_bit(folder, tmp_path, estimator):
    first, second = recorded_and_replayed(folder, tmp_path, estimator, ASYNC, FEW)
    assert_identical(trained(first), trained(second))


@pytest.mark.long
def test_a_recorded_run_that_was_killed_and_resumed_is_replayed_bit_for_bit(folder, tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    words = arguments(folder, first, "grpo", ASYNC, f"--record {tmp_path}/recording")
    assert warm.run(words, prepare=partial(at, (3, "update", 1), signal.SIGKILL)) == -signal.SIGKILL
    assert warm.run([*words, "--load_checkpoint"]) == 0
    assert warm.run(arguments(folder, second, "grpo", FEW, f"--replay {tmp_path}/recording")) == 0
    assert_identical(trained(first), trained(second))


@pytest.mark.long
def test_several_processes_are_replayed_bit_for_bit(folder, tmp_path):
    first, second = recorded_and_replayed(folder, tmp_path, "grpo", f"{ASYNC} --nproc 2", f"{FEW} --nproc 2")
    assert_identical(trained(first), trained(second))
