"""--push_to_hub and `trimtab push`, against a stand-in for the hub."""

import json
import os
import shlex
import subprocess
import sys

import pytest
import yaml
from safetensors.torch import load_file

from tests.cli.conftest import write_rows
from tests.cli.test_every_verb import OUT, RL, SUPERVISED
from tests.command import run
from tests.hub_standin import TOKEN, hub_standin
from trimtab import __version__, job
from trimtab.config.jobs import SFTOptions
from trimtab.config.parser import parse
from trimtab.embedded.sort_task import make_prompts

SFT = f"sft {SUPERVISED} --dataset train.jsonl {OUT}"
RUN_FILES = {"metrics.jsonl", "rollouts.jsonl", "tokens.jsonl", "options.yaml", "manifest.json", "report.html"}


@pytest.fixture
def hub(place, monkeypatch):
    with hub_standin(monkeypatch) as hub:
        yield hub


def card_of(files):
    _, about, text = files["README.md"].decode().split("---\n", 2)
    return yaml.safe_load(about), text


def test_a_model_is_uploaded_with_its_card_and_nothing_else_of_the_run(hub, place, capsys):
    ran = run(capsys, f"{SFT} --push_to_hub me/sorter --save_steps 1 --learning_rate 3e-4")
    assert f"hub      {hub.url}/me/sorter\n" in ran.said
    files = hub.files["me/sorter"]
    assert files["model.safetensors"] == (place / "out/model.safetensors").read_bytes()
    assert {"config.json", "tokenizer.json", "README.md"} < files.keys() and not RUN_FILES & files.keys()
    assert not [name for name in files if "/" in name], "no checkpoint"
    assert hub.private == {"me/sorter": True}
    about, text = card_of(files)
    assert about["library_name"] == "transformers" and about["pipeline_tag"] == "text-generation"
    assert about["tags"] == ["trimtab", "sft"] and "base_model" not in about, "a folder is no name on the hub"
    assert f"Supervised fine-tuning with trimtab {__version__}" in text
    assert "learning_rate: 0.0003" in text and "dataset: train.jsonl" in text and str(place) not in text
    loss = json.loads((place / "out/metrics.jsonl").read_text().splitlines()[-1])["loss"]
    assert f"| loss | {loss:.3g}"[:12] in text
    assert "names none" in text


def test_of_other_files_in_the_folder_only_the_models_code_is_uploaded(hub, place, capsys):
    run(capsys, SFT).said  # noqa: B018
    code = {"modeling_it.py": "from .parts import Part", "parts.py": "Part = 1"}
    private = dict.fromkeys(("train_script.py", "secret_config.json", "vocab_private.txt", "tokenizer.py", "x.txt"), "")
    for name, text in (code | private).items():
        (place / "out" / name).write_text(text)
    config = json.loads((place / "out/config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "modeling_it.It", "AutoConfig": "other/repo--configuration.It"}
    (place / "out/config.json").write_text(json.dumps(config))
    run(capsys, "push out me/sorter").said  # noqa: B018
    files = hub.files["me/sorter"].keys()
    assert {*code, "config.json", "model.safetensors"} < files and not private.keys() & files


def test_an_adapter_is_uploaded_with_the_licence_of_its_base(hub, place, capsys):
    (place / "licensed").mkdir()
    for path in (place / "model").iterdir():
        (place / "licensed" / path.name).symlink_to(path.resolve())
    licence = "license: other\nlicense_name: tiny\nlicense_link: LICENSE\n"
    (place / "licensed/README.md").write_text(f"---\n{licence}---\n# tiny\n")
    words = f"{SFT} --push_to_hub team/adapter --hub_private_repo False --lora_rank 2 --pretrain {place}/licensed"
    run(capsys, words).said  # noqa: B018
    files = hub.files["team/adapter"]
    assert {"adapter_model.safetensors", "adapter_config.json"} < files.keys()
    assert hub.private == {"team/adapter": False}
    about, text = card_of(files)
    assert {name: about[name] for name in yaml.safe_load(licence)} == yaml.safe_load(licence)
    assert about["library_name"] == "peft" and about["tags"] == ["trimtab", "sft", "lora"]
    assert "As the base model: other." in text and "lora_rank: 2" in text
    assert not [name for name, content in files.items() if str(place).encode() in content]
    assert json.loads(files["adapter_config.json"])["base_model_name_or_path"] == "licensed"


def test_figures_of_rl_are_on_the_card(hub, place, capsys):
    write_rows(place / "prompts.jsonl", make_prompts(4, 1))
    run(capsys, f"grpo {RL} {OUT} --push_to_hub sorter").said  # noqa: B018
    about, text = card_of(hub.files["me/sorter"])  # of the token's owner
    assert about["tags"] == ["trimtab", "grpo"]
    assert "Reinforcement learning (GRPO)" in text and "| mean reward |" in text


def test_a_failed_upload_loses_nothing_and_says_what_to_type(hub, place, capsys):
    hub.broken = "/api/models/me/sorter/commit"
    ran = run(capsys, f"{SFT} --push_to_hub me/sorter --hub_private_repo False")
    assert ran.code == 1 and load_file(place / "out/model.safetensors")
    (line,) = [line for line in ran.err.splitlines() if "not on the hub" in line]
    assert "out/ and not on the hub" in line and "507" in line
    _, _, again = line.partition("try again: ")
    hub.broken = None
    assert shlex.split(again) == ["trimtab", "push", "out", "me/sorter", "--public"]
    run(capsys, again.removeprefix("trimtab ")).said  # noqa: B018
    assert "model.safetensors" in hub.files["me/sorter"]


@pytest.mark.parametrize("repo", ["a b", "a/b/c", "./out", "me/", "-", "me/" + "a" * 200])
def test_a_wrong_name_is_refused_before_training(hub, refused_alike, repo):
    assert "owner/name" in refused_alike("sft", *shlex.split(SFT)[1:], "--push_to_hub", repo)
    assert not hub.asked


def test_without_a_token_or_with_a_wrong_one_nothing_is_trained(hub, refused_alike, monkeypatch):
    words = [*shlex.split(SFT)[1:], "--push_to_hub", "me/sorter"]
    monkeypatch.setenv("HF_TOKEN", "wrong")
    assert "refuses the token" in refused_alike("sft", *words, dry=False)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    hub.role = "read"
    assert "may only read" in refused_alike("sft", *words, dry=False)
    monkeypatch.delenv("HF_TOKEN")
    assert "needs a token" in refused_alike("sft", *words)
    assert hub.asked == ["GET /api/whoami-v2"] * 2 and not hub.files


def test_a_hub_that_does_not_answer_is_said_before_training(hub, refused_alike, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    words = [*shlex.split(SFT)[1:], "--push_to_hub", "me/sorter"]
    assert "does not answer" in refused_alike("sft", *words, dry=False)


def test_without_the_flag_and_in_a_dry_run_the_hub_is_not_asked(hub, capsys):
    run(capsys, f"{SFT} --push_to_hub me/sorter --dry_run").said  # noqa: B018
    run(capsys, SFT).said  # noqa: B018
    assert not hub.asked


def test_what_is_no_finished_run_is_not_pushed(hub, place, capsys):
    for folder in ("nowhere", "model"):
        assert "no finished run" in run(capsys, f"push {folder} me/sorter").mistake
    assert not hub.asked


def test_the_first_of_several_processes_uploads(hub, capsys, monkeypatch):
    run(capsys, SFT).said  # noqa: B018
    options = parse(SFTOptions, shlex.split(f"{SFT} --push_to_hub me/sorter")[1:])
    monkeypatch.setattr(job, "job_function", lambda options: lambda options: None)
    for rank in (1, 0):
        monkeypatch.setenv("RANK", str(rank))
        assert not hub.asked
        job._train(options)
    assert "model.safetensors" in hub.files["me/sorter"]


@pytest.mark.long
def test_of_several_processes_one_uploads(hub, place):
    words = shlex.split(f"{SFT} --push_to_hub me/sorter --nproc 2")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-m", "trimtab.cli.main", *words]
    ran = subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert sum(asked.endswith("/commit/main") for asked in hub.asked) == 1
    assert ran.stdout.count(f"{hub.url}/me/sorter") == 1
