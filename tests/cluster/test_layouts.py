"""Layouts on a real Ray: what is learnt is what one process learns, and Ray has put things where the flags say."""

from functools import partial

import pytest

from tests import warm
from tests.cluster.ray_run import LAYOUTS, keep_gradients_of_processes
from tests.rewards.judging import digits, judging
from tests.train.job_run import rows, write_model
from tests.train.rl.rl_run import EVALUATION, arguments, without
from tests.train.rl.test_groups import assert_same_gradients, keep_gradients, words
from trimtab.train.metrics import read_rows


@pytest.fixture(scope="module")
def alone(folder, tmp_path_factory):
    """A recording by one process, and its gradients."""
    place = tmp_path_factory.mktemp("alone")
    command = words(folder, place / "out", f"--record {place}/recorded")
    assert warm.run(command, prepare=partial(keep_gradients, place / "kept")) == 0
    return place


@pytest.mark.short(1)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_of_recorded_rollouts_are_those_of_one_process(cluster, folder, alone, tmp_path, layout):
    kept = tmp_path / "kept"
    kept.mkdir()
    command = words(folder, tmp_path / "out", f"--replay {alone}/recorded --ray {LAYOUTS[layout]}")
    cluster.workers.prepare(partial(keep_gradients_of_processes, kept))
    try:
        warm.output(command, environment=cluster.environment)
    finally:
        cluster.workers.prepare(None)
    for role in ("actor", "critic"):
        processes = list(kept.glob(f"*-{role}.safetensors"))
        assert len(processes) == (2 if "--actor_num_gpus_per_node 2" in LAYOUTS[layout] else 1)
        for found in processes:
            assert_same_gradients(found, alone / f"kept-{role}.safetensors")


def rewarded_by(folder, out, *more: str) -> list[str]:
    words = arguments(folder, out, "grpo", "--init_kl_coef 0 --max_steps 2 --num_episodes 1", *more)
    return without(words, "--reward_verifier", *EVALUATION)


@pytest.mark.short(1)
@pytest.mark.parametrize("kind", ["reverse_kl", "sampled"])
def test_a_teacher_on_a_device_of_its_own_teaches_what_it_teaches_in_one_process(cluster, folder, tmp_path, kind):
    write_model(tmp_path / "teacher", seed=3, hidden_size=64)
    teacher = f"--teacher_model {tmp_path}/teacher --teacher_divergence {kind}"
    apart = "--ray --actor_num_gpus_per_node 2 --ref_num_gpus_per_node 1"
    assert warm.run(rewarded_by(folder, tmp_path / "one", teacher)) == 0
    warm.output(rewarded_by(folder, tmp_path / "ray", teacher, apart), environment=cluster.environment)
    name = "teacher_kl" if kind == "sampled" else "distance"
    one, ray = ([(row[name], row["loss"], row["grad_norm"]) for row in rows(tmp_path / out)] for out in ("one", "ray"))
    assert len(one) == 2 and min(distance for distance, *_ in one) > 0.01
    assert [number for row in ray for number in row] == pytest.approx([n for row in one for n in row], abs=1e-5)


def test_check_on_ray_tries_weights_checkpoint_and_export(cluster, folder, tmp_path):
    words = arguments(folder, tmp_path / "out", "grpo", "--max_steps 2 --ray --actor_num_gpus_per_node 2")
    said = warm.output(["check", *words], environment=cluster.environment)
    for name in ("update", "engine", "reward", "checkpoint", "export"):
        assert f"check {name}: " in said
    assert "0 tensors read back otherwise, 0 differ after the next step: passed" in said
    assert "left out" not in said and "failed" not in said and not (tmp_path / "out").exists()


def test_a_judge_scores_the_answers_of_engines(cluster, folder, tmp_path):
    with judging() as judge:
        more = f"--judge {judge.url} --judge_retries 0 --ray --actor_num_gpus_per_node 2"
        words = rewarded_by(folder, tmp_path, more)
        warm.output(words, environment=cluster.environment)
    answers = [row for row in read_rows(tmp_path / "rollouts.jsonl") if "response" in row]
    assert answers and len(judge.asked) == len(set(judge.asked))
    for answer in answers:
        assert answer["parts"]["judge"] == pytest.approx(digits(answer["response"]) / 10)
