"""PaddleNLP's recipe from end to end in its tiny mode: puzzles, reward server, GRPO and REINFORCE++ from its files."""

import importlib
import os
import shutil
import statistics
from pathlib import Path

import pytest

from tests.examples.test_examples import EXAMPLES, run, words_given_to
from tests.report.pages import read_lines as read
from tests.rewards.running import running
from trimtab.config.job_file import with_config
from trimtab.config.parser import parse
from trimtab.config.rl_jobs import AnyRLOptions
from trimtab.embedded import knights_task
from trimtab.rewards.verifiers import make_verifier

METHODS = ("grpo", "reinforce_plus_plus")

pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="the recipes are bash scripts")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("knights")
    knights_task.write(folder / "knights_task")
    return folder


@pytest.fixture(scope="module")
def server():
    with running(make_verifier("kk")) as server:
        yield server


def commands(place: Path, *words: str, **settings: str) -> list[tuple[str, list[str]]]:
    """The modules and options that the recipe runs one after the other."""
    said = words_given_to("python", place, "paddlenlp/knights", *words, PYTHON="python", **settings)
    starts = [place for place, word in enumerate(said) if word == "-m"]
    return [(said[at + 1], said[at + 2 : end]) for at, end in zip(starts, [*starts[1:], len(said)])]


@pytest.mark.short(1)
@pytest.mark.parametrize("method", METHODS)
def test_the_recipe_learns_the_form_of_answers_in_its_tiny_mode(method, folder, server, tmp_path, capsys):
    tiny = {"TINY": "1", "TINY_FOLDER": str(folder), "REWARD_URL": server.url}
    chain = commands(tmp_path, method, **tiny)
    assert [module.rpartition(".")[2] for module, _ in chain] == ["main", "main", "run_rl"]
    for module, words in chain:
        assert importlib.import_module(module).main(words) == 0, capsys.readouterr().err
    place = folder / f"knights-{method}"
    puzzles, made = read(folder / "knights_task/train.jsonl"), read(place / "data/train.jsonl")
    assert len(made) == len(puzzles) == 900
    assert all(puzzle["quiz"] in row["src"][0] for row, puzzle in zip(made, puzzles))
    rewards = [row["reward"] for row in read(place / "metrics.jsonl") if row["step"] > 0]
    assert len(rewards) == 10 and all(-3 <= reward <= 3 for reward in rewards)
    assert statistics.fmean(rewards[-4:]) > statistics.fmean(rewards[:2]) + 0.1
    assert (place / "report.html").is_file() and (place / "model.safetensors").is_file()
    assert commands(tmp_path, method, **tiny) == chain, "rows of an earlier run are not taken for those of this one"


@pytest.mark.parametrize("method", METHODS)
def test_the_whole_recipe_is_the_guides(method, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    url = "http://127.0.0.1:8731"
    *made, (module, words) = commands(tmp_path, method, REWARD_URL=url, ROWS="a.parquet", TEST_ROWS="b.parquet")
    folder = f"./checkpoint/knights-{method}"
    assert made == [
        ("trimtab.cli.main", ["kk-data", f"{source}.parquet", f"{folder}/data/{name}.jsonl"])
        for source, name in (("a", "train"), ("b", "test"))
    ]
    options = parse(AnyRLOptions, with_config(words))
    assert module == "trimtab.cli.run_rl" and options.pretrain.count("/") == 1
    assert (options.rollout_batch_size, options.n_samples_per_prompt, options.generate_max_len) == (8, 8, 4096)
    assert options.remote_rm_url == url and options.use_visualdl == f"{folder}/vdl_log"
    assert options.advantage_estimator == {"grpo": "group_norm"}.get(method, "reinforce")


@pytest.mark.long
def test_the_recipe_as_a_script_ends_its_server_and_says_where_it_failed(folder, tmp_path):
    done = run("paddlenlp/knights", "--max_steps", "1", TINY="1", TINY_FOLDER=str(folder), PATH=os.environ["PATH"])
    assert done.returncode == 0, done.stderr.decode()
    assert "http://127.0.0.1:" in done.stdout.decode(), "what the rewards come from"
    failed = run("paddlenlp/knights", "--no_such_option", TINY="1", TINY_FOLDER=str(folder))
    assert failed.returncode == 2 and b"--no_such_option" in failed.stderr


def test_it_can_be_run():
    assert os.access(EXAMPLES / "paddlenlp" / "knights.sh", os.X_OK)
