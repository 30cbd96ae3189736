import importlib
import json
import sys
import types

import pytest

from trimtab.errors import Interrupted, RunFailed, UserError
from trimtab.report import page

GOOD = ["--pretrain", "owner/model", "--dataset", "owner/data"]
JOBS = {
    **{"sft": [], "rm": ["--value_prefix_head", "score"], "dpo": ["--ipo"], "kto": ["--desirable_weight", "2"]},
    **{"prm": ["--placeholder_token", "ки", "--reward_tokens", "+", "-"], "kd": ["--teacher_model", "owner/teacher"]},
}
PROMPTS = ["--pretrain", "owner/model", "--prompt_data", "owner/prompts", "--reward_pretrain", "owner/judge"]


def train(name: str, *words: str) -> int:
    """The exit code of `python -m trimtab.cli.train_NAME`."""
    return importlib.import_module(f"trimtab.cli.train_{name}").main([*words])


@pytest.fixture
def run(tmp_path):
    return tmp_path / "run"


@pytest.fixture(autouse=True)
def one_process(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)


@pytest.fixture
def stub(monkeypatch):
    """Puts a module in the place of trimtab.train.TRAINER."""

    def put(verb, train=None, rehearse=None):
        trainer = "rl" if verb == "rl" else "supervised"

        def never(options):
            raise AssertionError("must not be reached")

        module = types.ModuleType(f"trimtab.train.{trainer}")
        setattr(module, f"train_{trainer}", train or never)
        setattr(module, f"dry_run_{trainer}", rehearse or never)
        monkeypatch.setitem(sys.modules, module.__name__, module)

    return put


def training(folder, error=None):
    """A run of one step that leaves its metrics, then ends as told."""

    def one_step(options):
        folder.mkdir(exist_ok=True)
        (folder / "metrics.jsonl").write_text(json.dumps({"step": 1, "loss": 0.5}) + "\n")
        if error is not None:
            raise error

    return one_step


@pytest.mark.parametrize("verb", JOBS)
def test_a_dry_run_rehearses_the_jobs_own_module_and_trains_nothing(verb, stub, capsys):
    seen = []
    stub(verb, rehearse=lambda options: seen.append(options) or ["2 steps"])
    assert train(verb, *GOOD, *JOBS[verb], "--dry_run") == 0
    output = capsys.readouterr()
    assert seen[0].verb == verb and seen[0].pretrain == "owner/model"
    assert output.out.startswith(f"# trimtab {verb}\n") and output.out.endswith("# 2 steps\n") and output.err == ""


@pytest.mark.parametrize("name", ["ppo", "ppo_ray", "grpo", "reinforce", "rloo", "rl"])
def test_every_rl_command_has_the_same_trainer(name, stub, capsys):
    seen, verb = [], name.removesuffix("_ray")
    stub("rl", rehearse=lambda options: seen.append(options) or ["2 steps"])
    assert train(name, *PROMPTS, "--dry_run") == 0
    assert seen[0].verb == verb and capsys.readouterr().out.startswith(f"# trimtab {verb}\n")


def test_gpus_that_are_not_here_are_a_warning_in_a_dry_run_and_a_refusal_at_the_start(stub, capsys, monkeypatch):
    monkeypatch.setattr("trimtab.distributed.device.count_accelerators", lambda: 1)
    stub("rl", rehearse=lambda options: [])
    words = [*PROMPTS, "--actor_num_nodes", "2", "--actor_num_gpus_per_node", "8"]
    assert train("ppo", *words, "--dry_run") == 0
    machines, gpus = capsys.readouterr().err.splitlines()
    assert machines.startswith("trimtab ppo: warning: --actor_num_nodes 2 asks for several machines")
    assert gpus.startswith("trimtab ppo: warning: models and engines ask for 8 GPUs, and this machine has 1")
    assert train("ppo", *words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("trimtab ppo: error: --actor_num_nodes 2 asks") and "ask for 8 GPUs" in line


@pytest.mark.parametrize(
    "name, words, ray",
    [
        ("ppo_ray", [], True),
        ("ppo_ray", ["--ray", "False"], False),
        ("ppo_ray", ["--advantage_estimator", "reinforce"], True),
        ("grpo", ["--ray"], True),
        ("ppo", [], False),
    ],
)
def test_the_module_that_is_named_after_ray_means_it(name, words, ray, stub, monkeypatch, capsys):
    seen = []
    stub("rl", train=seen.append)
    monkeypatch.setattr("trimtab.job.watch", lambda limit: None)
    monkeypatch.setattr("trimtab.config.resolved_config.find_spec", lambda module: object())
    assert train(name, *PROMPTS, *words) == 0
    assert seen[0].ray is ray


def test_with_ray_no_launcher_starts_processes(stub, monkeypatch, capsys):
    seen = []
    stub("rl", train=seen.append)
    monkeypatch.setattr("trimtab.job.watch", lambda limit: None)
    monkeypatch.setattr("trimtab.job.launch_processes", None)
    monkeypatch.setattr("trimtab.config.resolved_config.find_spec", lambda module: object())
    assert train("ppo_ray", *PROMPTS, "--actor_num_nodes", "2", "--actor_num_gpus_per_node", "8") == 0
    assert (seen[0].nproc, seen[0].processes) == (8, 16)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert train("ppo_ray", *PROMPTS) == 2
    assert "error: --ray starts the processes of a run by itself" in capsys.readouterr().err


def test_without_the_package_ray_says_how_to_get_it_or_do_without(stub, monkeypatch, capsys):
    monkeypatch.setattr("trimtab.config.resolved_config.find_spec", lambda module: None)
    stub("rl")
    assert train("ppo_ray", *PROMPTS) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == (
        "trimtab ppo: error: --ray needs the package ray: pip install 'trimtab[ray]', or stay on this machine with "
        "--ray False"
    )


@pytest.mark.parametrize("verb", JOBS)
def test_a_run_ends_with_its_report_and_where_everything_is(verb, stub, run, capsys):
    stub(verb, train=training(run))
    assert train(verb, *GOOD, *JOBS[verb], "--save_path", str(run)) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"model    {run}/",
        f"metrics  {run}/metrics.jsonl",
        f"report   {run}/report.html",
    ]
    assert (run / "report.html").is_file()


def test_with_lora_the_run_leaves_an_adapter(stub, run, capsys):
    stub("dpo", train=training(run))
    assert train("dpo", *GOOD, "--lora_rank", "4", "--save_path", str(run)) == 0
    assert capsys.readouterr().out.startswith(f"adapter  {run}/\n")


@pytest.mark.parametrize("error, code", [(Interrupted(15, "stopped after step 1"), 143), (RunFailed("not finite"), 1)])
def test_a_run_that_ended_early_has_its_report_too_but_no_model_to_name(error, code, stub, run, capsys):
    stub("rm", train=training(run, error))
    assert train("rm", *GOOD, "--save_path", str(run)) == code
    output = capsys.readouterr()
    assert output.out.splitlines() == [f"metrics  {run}/metrics.jsonl", f"report   {run}/report.html"]
    assert output.err.endswith(f"{error}\n") and (run / "report.html").is_file()


def test_a_mistake_found_late_writes_no_report(stub, run, capsys):
    stub("kto", train=training(run, UserError("the disk is full")))
    assert train("kto", *GOOD, "--save_path", str(run)) == 2
    output = capsys.readouterr()
    assert output.err == "trimtab kto: error: the disk is full\n" and output.out == ""
    assert not (run / "report.html").exists()


@pytest.mark.parametrize("error", [OSError("no\nspace"), ZeroDivisionError(), UserError("no metrics")])
def test_a_report_that_fails_is_one_warning_and_not_a_failed_run(error, stub, run, monkeypatch, capsys):
    def write_report(folder):
        raise error

    monkeypatch.setattr(page, "write_report", write_report)
    stub("dpo", train=training(run))
    assert train("dpo", *GOOD, "--save_path", str(run)) == 0
    output = capsys.readouterr()
    assert output.err.startswith("trimtab dpo: warning: no report was written: ") and output.err.count("\n") == 1
    assert output.out.splitlines() == [f"model    {run}/", f"metrics  {run}/metrics.jsonl"]


def test_samples_that_fail_are_one_warning_and_the_report_is_written_all_the_same(stub, run, monkeypatch, capsys):
    from trimtab.evaluate import report_samples

    def write_samples(options):
        raise MemoryError("no room\nfor two models")

    monkeypatch.setattr(report_samples, "write_samples", write_samples)
    stub("dpo", train=training(run))
    assert train("dpo", *GOOD, "--save_path", str(run), "--report_samples", "2") == 0
    output = capsys.readouterr()
    assert output.err == "trimtab dpo: warning: no samples were written: no room for two models\n"
    assert output.out.endswith(f"report   {run}/report.html\n")
