"""Every recipe in examples/ runs in its tiny mode. bash puts the command together; all but one are then run in this
process, because importing torch anew costs more than training the tiny models."""

import importlib
import json
import math
import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import warm
from tests.config.every_job import EVERY_JOB
from trimtab.config import jobs
from trimtab.config.parser import parse
from trimtab.config.resolved_config import check, refuse_unimplemented, settle

EXAMPLES = Path(__file__).parents[2] / "examples"
SPLIT = ("train_sft_ring", "train_dpo_ring", "train_sft_tensor")  # over two processes at least
RECIPES = sorted(path.stem for path in EXAMPLES.glob("train_*.sh") if path.stem not in SPLIT)
DPO_VARIANTS = ("ipo", "cdpo", "orpo", "simpo")
FUNCTION = {"REWARD_FUNCTION": str(EXAMPLES / "reward_func.py")}
JOBS = [
    *(pytest.param(name, (), {}, id=name) for name in RECIPES),
    *(pytest.param("train_dpo", (variant,), {}, id=f"train_dpo-{variant}") for variant in DPO_VARIANTS),
    pytest.param("train_reinforce", (), FUNCTION, id="train_reinforce-function"),
]

pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="the recipes are bash scripts")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("examples")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["tiny_recipes", str(folder / "task")])
        runpy.run_module("trimtab.embedded.tiny_recipes", run_name="__main__")
    return folder


def run(name: str, *words: str, **settings: str) -> subprocess.CompletedProcess:
    ours = ("MODEL", "DATA", "SAVE_PATH", "LAUNCH", "REWARD_MODEL", "REWARD_URL", "REWARD_FUNCTION")
    kept = {name: value for name, value in os.environ.items() if name not in ours}
    return subprocess.run(
        ["bash", str(EXAMPLES / f"{name}.sh"), *words],
        env=kept | {"PYTHON": sys.executable} | settings,
        capture_output=True,
        timeout=120,
    )


def command(name: str, *words: str, **settings: str) -> tuple[str, list[str]]:
    """The module and the options that the recipe would start."""
    done = run(name, *words, LAUNCH=r"printf %s\0", **settings)
    assert done.returncode == 0, done.stderr.decode()
    module, *options = done.stdout.decode().split("\0")[:-1]
    return module, options


def words_given_to(program: str, place: Path, name: str, *words: str, **settings: str) -> list[str]:
    """What the recipe says to a program, which is replaced by one that repeats its words."""
    (place / program).write_text('#!/bin/sh\nprintf "%s\\0" "$@"\n')
    (place / program).chmod(0o755)
    done = run(name, *words, PATH=f"{place}:{os.environ['PATH']}", **settings)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode().split("\0")[:-1]


def tiny_command(folder: Path, name: str, *words: str, **settings: str) -> tuple[str, list[str]]:
    return command(name, *words, TINY="1", TINY_FOLDER=str(folder), **settings)


def metrics(save_path: str, name: str = "loss") -> list[float]:
    lines = (Path(save_path) / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)[name] for line in lines]


def options_class(module: str) -> type:
    (found,) = (job for job in EVERY_JOB if job.verb == module.rpartition("_")[2])
    return found


def test_there_is_a_recipe_for_every_job_and_for_the_mixture_of_experts():
    verbs = ("sft", "rm", "prm", "dpo", "kto", "kd", "ppo", "reinforce", "grpo")
    assert set(RECIPES) == {f"train_{verb}" for verb in verbs} | {"train_sft_mixtral_lora"}
    assert all(os.access(EXAMPLES / f"{name}.sh", os.X_OK) for name in (*RECIPES, *SPLIT))


@pytest.mark.short(3)
@pytest.mark.parametrize("name, words, settings", JOBS)
def test_a_recipe_trains_in_its_tiny_mode(name, words, settings, folder, capsys):
    module, options = tiny_command(folder, name, *words, **settings)
    if options_class(module).trainer == "rl":  # to draw in bf16 is slow on a CPU that does not know it
        options += ["--max_samples", "24"]
    settled, _ = settle(parse(options_class(module), options))
    assert importlib.import_module(module).main(options) == 0, capsys.readouterr().err
    seen = metrics(settled.save_path)
    assert len(seen) == (3 if settled.trainer == "rl" else 8)
    if settled.trainer == "rl":  # what is learnt here is no loss that falls
        assert all(map(math.isfinite, seen))
        if settled.reward_pretrain is None:  # random weights are never right, which the function pays nothing for
            assert max(metrics(settled.save_path, "reward/reward_func/brief")) > 0
        else:
            assert max(metrics(settled.save_path, "grad_norm")) > 0
    else:
        assert min(seen[-3:]) < seen[0]
    assert (Path(settled.save_path) / "report.html").is_file()
    assert Path(settled.save_path).parent == folder
    weights = "adapter_model.safetensors" if settled.lora_rank else "model.safetensors"
    assert (Path(settled.save_path) / weights).is_file()


@pytest.mark.long
@pytest.mark.parametrize("name", SPLIT)
def test_a_recipe_for_several_processes_trains_in_its_tiny_mode_in_two(name, folder):
    module, options = tiny_command(folder, name)
    settled, _ = settle(parse(options_class(module), options))
    assert settled.ring_attn_size * settled.ds_tensor_parallel_size == 2
    assert warm.run_world([settled.verb, *options], 2) == [0, 0]
    seen = metrics(settled.save_path)
    assert len(seen) == 8 and min(seen[-3:]) < seen[0]
    assert (Path(settled.save_path) / "model.safetensors").is_file()


def test_a_recipe_for_several_processes_starts_two_in_its_tiny_mode(folder, tmp_path):
    words = words_given_to("torchrun", tmp_path, "train_sft_ring", TINY="1", TINY_FOLDER=str(folder))
    assert words[:3] == ["--standalone", "--nproc_per_node", "2"]


def test_a_recipe_runs_as_a_script(folder, tmp_path):
    done = run(
        "train_sft", "--max_samples", "8", "--save_path", str(tmp_path / "a b"), TINY="1", TINY_FOLDER=str(folder)
    )
    assert done.returncode == 0, done.stderr.decode()
    assert len(metrics(str(tmp_path / "a b"))) == 1


def test_the_tiny_task_is_made_where_there_is_none(tmp_path):
    place = tmp_path / "tiny place"
    lines = words_given_to("python", tmp_path, "train_kd", TINY="1", TINY_FOLDER=str(place), PYTHON="python")
    assert lines[:3] == ["-m", "trimtab.embedded.tiny_recipes", f"{place}/task"]
    assert lines[3:5] == ["-m", "trimtab.cli.train_kd"]


@pytest.mark.parametrize("name, words, settings", [*JOBS, *((name, (), {}) for name in SPLIT)])
def test_a_whole_recipe_passes_the_checks_and_is_not_small(name, words, settings, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    module, written = command(name, *words, **settings)
    options, warnings = settle(parse(options_class(module), written))
    assert warnings + check(options) == []
    refuse_unimplemented(options)
    if options.trainer == "rl":
        longest, data = options.prompt_max_len + options.generate_max_len, options.prompt_data
    else:
        longest, data = options.max_len, options.dataset
    assert options.train_batch_size >= 64 and longest >= 2048 and options.bf16
    assert options.pretrain.count("/") == data.count("/") == 1


def test_the_variants_of_dpo_differ_in_their_loss(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    chosen = {}
    for variant in ("dpo", *DPO_VARIANTS):
        options, _ = settle(parse(jobs.DPOOptions, command("train_dpo", variant)[1]))
        chosen[variant] = (options.preference_loss, options.label_smoothing)
    assert chosen.pop("cdpo") == ("dpo", 0.1)
    assert chosen == {name: (name, 0) for name in ("dpo", "ipo", "orpo", "simpo")}


def test_names_come_from_the_environment_and_the_users_options_win():
    _, words = command("train_rm", "--learning_rate", "1e-5", MODEL="my/model", DATA="a b.jsonl", SAVE_PATH="out")
    options = parse(jobs.RMOptions, words)
    assert (options.pretrain, options.dataset, options.save_path) == ("my/model", "a b.jsonl", "out")
    assert options.learning_rate == 1e-5


def test_a_server_can_give_the_rewards_of_ppo(folder, tmp_path):
    served = words_given_to("python", tmp_path, "serve_rm", TINY="1", TINY_FOLDER=str(folder), PYTHON="python")
    assert served[:2] == ["-m", "trimtab.cli.serve_rm"]
    server, _ = settle(parse(jobs.ServeRMOptions, served[2:]))
    check(server)
    address = f"http://{server.host}:{server.port}/get_reward"
    options = parse(jobs.PPOOptions, command("train_ppo", REWARD_URL=address)[1])
    assert (options.remote_rm_url, options.reward_pretrain) == (address, None)
    assert options.critic_pretrain is not None


def test_a_function_can_give_the_rewards_of_reinforce():
    options = parse(jobs.ReinforceOptions, command("train_reinforce", **FUNCTION)[1])
    assert (options.remote_rm_url, options.reward_pretrain) == (FUNCTION["REWARD_FUNCTION"], None)
    assert (options.input_key, options.label_key) == ("problem", "answer")
    by_model = parse(jobs.ReinforceOptions, command("train_reinforce")[1])
    assert (by_model.remote_rm_url, by_model.input_key) == (None, "context_messages")
    assert by_model.reward_pretrain and by_model.prompt_data != options.prompt_data


def test_the_readme_names_every_recipe():
    readme = (EXAMPLES.parent / "README.md").read_text()
    (listed,) = (part for part in readme.split("\n- ") if part.startswith("[examples/]"))
    listed = " ".join(listed.split())
    chains = ("rejection sampling", "iterative DPO", "conditional SFT", "reward server", "RePULSe's toy")
    assert all(recipe in listed for recipe in ("PPO", "GRPO", "REINFORCE++ with a reward model or a function", *chains))


def test_several_processes_are_started_by_torchrun(tmp_path):
    words = words_given_to("torchrun", tmp_path, "train_sft", PROCESSES="2")
    assert words[:5] == ["--standalone", "--nproc_per_node", "2", "-m", "trimtab.cli.train_sft"]


def test_the_reward_to_start_from_is_nothing_for_a_wrong_answer_however_brief():
    known = runpy.run_path(str(EXAMPLES / "reward_func.py"))
    answers = ["no", "no " * 50, "so it is 4", "4"]
    rewards = known["reward_func"]([f"2+2={answer}" for answer in answers], ["2+2="] * 4, ["4"] * 4)["rewards"]
    assert rewards[0] == rewards[1] == 0 and 1 < rewards[2] < rewards[3]
