"""Every command and every piece of Python in the pages about jobs runs, on few rows."""

import re
import shutil
import subprocess
from contextlib import nullcontext

import pytest

from tests.config.every_job import EVERY_JOB
from tests.docs.pages import DOCS, blocks, commands
from tests.hub_standin import hub_standin
from tests.rewards.judging import judging
from trimtab.cli.main import main
from trimtab.config.option import find

FEW = ["--max_samples", "72"]  # two steps at the pages' batch size, the second a small one
EXTRA = {verb: [*FEW, "--eval_max_samples", "72"] for verb in ("sft", "rm", "prm", "dpo", "kto", "kd")}
EXTRA |= {"generate": FEW, "check": FEW}
TWO_ITERATIONS = ["--max_samples", "40", "--eval_max_samples", "40"]
EXTRA |= {verb: TWO_ITERATIONS for verb in ("ppo", "grpo", "reinforce", "rloo")}
EXTRA |= {verb: ["--dry_run"] for verb in ("serve", "serve-rm")}  # else they would serve for ever; others talk to them

OF_PLAN = ("on", "device_memory", "nodes", "gpus", "network")  # its own words
OF_WATCH = ("page",)
OF_PUSH = ("public",)
OF_OTHERS = ("devices", "logdir", "host", "nproc_per_node")  # Paddle's launcher, VisualDL, torchrun
OF_OTHERS += ("model_args", "tasks", "table")  # lm-evaluation-harness, benchmarks/plan_layouts.py
LEFT_BY = {  # page: what its commands must have made
    "sft": ["my-adapter/adapter_config.json", "my-model/report.html"],
    "reward_model": ["my-reward-model/rewards.json", "my-merged-reward-model/config.json"],
    "process_reward": ["my-judge/model.safetensors", "my-judge-adapter/adapter_config.json"],
    "dpo": ["my-dpo/model.safetensors", "my-merged-dpo/model.safetensors", "my-simpo/report.html"],
    "kto": ["my-kto/model.safetensors", "my-kto-adapter/adapter_config.json"],
    "rewards": [
        *("my-reward-model/rewards.json", "my-judge/model.safetensors"),
        *("my-programmer/metrics.jsonl", "judged/judge.jsonl"),
    ],
    "generate": ["answers.jsonl", "best.jsonl", "my-better-model/report.html", "my-first-round/model.safetensors"],
    "rl": [
        *("my-ppo/report.html", "my-rloo/adapter_config.json", "my-grpo/comparison.html"),
        "my-resumable-grpo/report.html",
    ],
    "plan": ["my-planned-model/report.html"],
    "check": [],
    "distillation": [
        *("my-student/model.safetensors", "my-third-student/metrics.jsonl"),
        *("my-on-policy-student/report.html", "my-self-taught/report.html"),
    ],
}


@pytest.fixture(scope="module")
def quickstarted(tmp_path_factory):
    """A folder after `trimtab quickstart`, the first command of every page."""
    folder = tmp_path_factory.mktemp("pages")
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(folder)
        patched.setenv("TRIMTAB_CACHE", str(folder / "cache"))
        assert main(["quickstart", "--steps", "2", "--iterations", "1"]) == 0
    return folder


@pytest.fixture
def folder(quickstarted, tmp_path, monkeypatch):
    shutil.copytree(quickstarted, tmp_path / "here")
    (tmp_path / "here" / "examples").symlink_to(DOCS.parent / "examples")
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


@pytest.mark.short(4)
@pytest.mark.parametrize("page", [*LEFT_BY, "serve"])
def test_every_command_of_a_page_runs(folder, page, capsys, monkeypatch):
    with judging() as judge, hub_standin(monkeypatch) if page == "sft" else nullcontext():
        run_page(folder, page, capsys, {"http://127.0.0.1:8000/v1": judge.url})


def run_page(folder, page, capsys, standins):
    """`standins`: addresses in place of those of servers, which would run for ever."""
    (first, *others) = commands(page)
    assert first == ["trimtab", "quickstart"] and len(others) >= 2
    for program, verb, *rest in others:
        rest = [standins.get(word, word) for word in rest]
        if program == "printf":
            *rest, _, name = rest
            (folder / name).write_bytes(subprocess.run([program, verb, *rest], capture_output=True, check=True).stdout)
            continue
        assert program == "trimtab"
        assert main([verb, *rest, *EXTRA.get(verb, [])]) == 0, (verb, rest, capsys.readouterr().err)
    for name in LEFT_BY.get(page, ()):
        assert (folder / name).is_file(), name
    known: dict = {}
    for code in blocks(page, "python"):
        exec(compile(code, f"{page}.md", "exec"), known)
        # What a page calculates are two scores that differ, or a probability for each of four steps.
        figures = known.get("scores") or known.get("probabilities")
        assert len(set(figures)) == len(figures) in (2, 4) and all(isinstance(figure, float) for figure in figures)
    if "score" in known:
        assert known["score"] == pytest.approx(known["scores"][0], abs=1e-5)


def test_the_code_of_the_page_about_rollouts_runs(folder, capsys):
    known: dict = {}
    for code in blocks("rollout", "python"):
        exec(compile(code, "rollout.md", "exec"), known)
    assert len(known["rollouts"]) == 8 and len(capsys.readouterr().out.splitlines()) >= 8
    assert [rollout.finish for rollout in known["seen"]] == ["length", "abort"]


def test_the_pages_promise_of_what_a_run_leaves_is_kept(folder):
    page = (DOCS / "sft.md").read_text()
    promised = re.findall(r"`([\w.]+\.\w+)`", page.split("## What a run leaves")[1].split("## Data")[0])
    assert len(promised) >= 5
    for name in promised:
        assert (folder / "quickstart" / "sft" / name).is_file(), name


@pytest.mark.parametrize("page", [*LEFT_BY, "sharding", "paddlenlp", "serve", "agents"])
def test_every_option_a_page_names_exists_and_every_link_leads_somewhere(page):
    text = (DOCS / f"{page}.md").read_text()
    unknown = {name for name in re.findall(r"--(\w+)", text) if not any(find(job, name) for job in EVERY_JOB)}
    assert not unknown - {"help", "module", "model", *OF_PLAN, *OF_WATCH, *OF_PUSH, *OF_OTHERS}
    for target in re.findall(r"\]\(([\w./]+)[)#]", text):
        assert (DOCS / target).exists(), target


def test_the_readme_names_every_page():
    readme = (DOCS.parent / "README.md").read_text()
    assert all(f"docs/{page}.md" in readme for page in (*LEFT_BY, "sharding"))
