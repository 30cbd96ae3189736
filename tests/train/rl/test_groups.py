"""Roles in groups of different sizes: some processes of a launcher have a role, others do not."""

from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests import warm
from tests.train.job_run import rows
from tests.train.rl.rl_run import arguments
from trimtab.train.metrics import read_rows

SMALL = "--max_steps 1 --actor_learning_rate 1e-5 --critic_learning_rate 1e-5"


def words(folder: Path, out: Path, *more: str) -> list[str]:
    return arguments(folder, out, "ppo", SMALL, f"--reward_pretrain {folder}/judge", *more)


def keep_gradients(place: Path) -> None:
    """Write the gradients of the first update of actor and critic down, as they are before the optimizer."""
    from trimtab.distributed.fsdp import whole
    from trimtab.train.optimizer import Optimizer

    plain = Optimizer.step

    def step(self, number, **more):
        found = {name: whole(p.grad).clone() for name, p in self.working.items() if p.grad is not None}
        role = "critic" if any("score" in name for name in found) else "actor"
        path = place.with_name(f"{place.name}-{role}.safetensors")
        if not path.exists():
            save_file(found, path)
        return plain(self, number, **more)

    Optimizer.step = step


def assert_same_gradients(found: Path, expected: Path) -> None:
    torch.testing.assert_close(load_file(found), load_file(expected), atol=1e-5, rtol=1e-5)


def count_parameters(place: Path) -> None:
    """Write down how many parameters this process holds when it learns."""
    import gc

    from trimtab.models.packed import PackedModel
    from trimtab.train.rl.loop import RLRun

    plain = RLRun.update

    def update(self, *given):
        held = [thing for thing in gc.get_objects() if isinstance(thing, PackedModel)]
        place.write_text(str(sum(p.numel() for model in held for p in model.parameters())))
        return plain(self, *given)

    RLRun.update = update


@pytest.mark.parametrize(
    "layout",
    [
        "--reward_num_gpus_per_node 1",
        pytest.param(
            "--ref_num_gpus_per_node 1 --critic_num_gpus_per_node 1 --colocate_all_models --zero_stage 3",
            marks=pytest.mark.long,
        ),
    ],
)
def test_the_gradients_of_a_recorded_rollout_are_those_of_one_process(folder, tmp_path, layout):
    alone, recorded = tmp_path / "alone", tmp_path / "recorded"
    prepare = partial(keep_gradients, alone)
    assert warm.run(words(folder, tmp_path / "one", f"--record {recorded}"), prepare=prepare) == 0
    more = words(folder, tmp_path / "two", f"--replay {recorded}", layout)
    prepared = {rank: partial(keep_gradients, tmp_path / f"of{rank}") for rank in range(2)}
    assert warm.run_world(more, 2, prepare=prepared) == [0, 0]
    for role in ("actor", "critic"):
        assert_same_gradients(tmp_path / f"of1-{role}.safetensors", alone.with_name(f"alone-{role}.safetensors"))


@pytest.mark.long
def test_a_reward_model_on_one_of_two_processes_gives_what_it_gives_alone(folder, tmp_path):
    assert warm.run(words(folder, tmp_path / "one")) == 0
    assert warm.run_world(words(folder, tmp_path / "two", "--reward_num_gpus_per_node 1"), 2) == [0, 0]
    found = {}
    for out in ("one", "two"):
        assert "judge" in (tmp_path / out / "manifest.json").read_text()
        kept = read_rows(tmp_path / out / "rollouts.jsonl")
        found[out] = [(row["response"], pytest.approx(row["reward"], abs=1e-5)) for row in kept]
    assert len(found["one"]) > 4 and found["one"] == [(text, reward.expected) for text, reward in found["two"]]


@pytest.mark.parametrize("kept", ["--zero_stage 3", pytest.param("--ref_reward_offload", marks=pytest.mark.long)])
def test_a_split_reward_model_makes_equally_many_passes_in_all_processes(folder, tmp_path, kept):
    """Five answers in passes of one: three in one process, two in the other."""
    uneven = f"--micro_rollout_batch_size 1 --rollout_batch_size 5 --n_samples_per_prompt 1 {kept}"
    rewards = []
    for out, run in (("one", warm.run), ("two", lambda given: max(warm.run_world(given, 2)))):
        given = arguments(folder, tmp_path / out, "reinforce", SMALL, f"--reward_pretrain {folder}/judge", uneven)
        assert run(given) == 0
        rewards.append(rows(tmp_path / out)[-1]["reward/judge"])
    assert rewards[0] == pytest.approx(rewards[1], abs=1e-5) and abs(rewards[0]) > 1e-3


@pytest.mark.parametrize("apart, held", [("--controller_apart", False), pytest.param("", True, marks=pytest.mark.long)])
def test_a_controller_holds_parameters_unless_it_is_asked_to_hold_none(folder, tmp_path, apart, held):
    prepare = {0: partial(count_parameters, tmp_path / "count")}
    assert warm.run_world(words(folder, tmp_path / "out", apart), 2, prepare=prepare) == [0, 0]
    assert (int((tmp_path / "count").read_text()) > 0) == held
