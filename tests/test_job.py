import gc
import os
import subprocess
import sys

import pytest

from trimtab import job
from trimtab.api.run import ProcessOutput
from trimtab.config.jobs import SFTOptions
from trimtab.distributed.supervision import LAUNCHER_SOCKET
from trimtab.errors import RunFailed, UserError
from trimtab.files import locked
from trimtab.job import prepared


def test_options_that_were_made_in_python_are_settled_and_checked(capsys):
    options = prepared(SFTOptions(pretrain="owner/model", dataset="owner/data", input_template="Question"))
    assert options.input_template is None and options.ckpt_path == "./ckpt/checkpoints"
    assert capsys.readouterr().err.startswith("trimtab sft: warning: --input_template has no {}")
    with pytest.raises(UserError, match="--max_len is 0"):
        prepared(SFTOptions(pretrain="owner/model", dataset="owner/data", max_len=0))


def test_what_this_machine_lacks_is_said_in_a_dry_run_and_refused_else(monkeypatch, capsys):
    monkeypatch.setattr("trimtab.config.resolved_config.find_spec", lambda module: None)
    liger = {"pretrain": "owner/model", "dataset": "owner/data", "use_liger_kernel": True}
    prepared(SFTOptions(**liger, dry_run=True))
    assert "--use_liger_kernel needs the package" in capsys.readouterr().err
    with pytest.raises(UserError, match="--use_liger_kernel needs the package"):
        prepared(SFTOptions(**liger))


def test_imports_of_a_job_are_excluded_from_garbage_collection(monkeypatch, tmp_path):
    (tmp_path / "heavy_module.py").write_text("import gc\ncollects, parts = gc.isenabled(), [[] for _ in range(1000)]")
    monkeypatch.syspath_prepend(tmp_path)
    before = gc.get_freeze_count()
    module = job.imported("heavy_module")
    monkeypatch.delitem(sys.modules, "heavy_module")
    assert not module.collects and gc.isenabled() and gc.get_freeze_count() >= before + 1000
    monkeypatch.setitem(sys.modules, "heavy_module", module)
    frozen = gc.get_freeze_count()
    assert job.imported("heavy_module") is module and gc.get_freeze_count() <= frozen
    with pytest.raises(ModuleNotFoundError):
        job.imported("no_such_module")
    assert gc.isenabled()


MISTAKES = """
import sys
from pathlib import Path

from trimtab.cli.main import main

Path("hollow").mkdir()
Path("rows.jsonl").write_text('{"input": "a", "output": "b"}')
Path("empty.jsonl").write_text(" ")
rows, reward = ["--dataset", "rows.jsonl"], ["--reward_pretrain", "hollow"]
main(["sft", "--pretrain", "hollow", *rows, "--bf16"])
main(["dpo", "--pretrain", "owner/model", "--dataset", "empty.jsonl"])
main(["sft", "--pretrain", "owner/model", "--dataset", "hollow"])
main(["serve-rm", *reward])
assert "torch" not in sys.modules and "datasets" not in sys.modules
"""


def test_folders_without_a_model_and_files_without_rows_are_refused_before_torch_is_imported(tmp_path):
    command = [sys.executable, "-c", MISTAKES]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert ended.stderr.splitlines() == [
        "trimtab sft: error: --pretrain hollow: no config.json in this folder; is it a Hugging Face model?",
        "trimtab dpo: error: empty.jsonl is empty: it holds no rows",
        "trimtab sft: error: no data in hollow: it holds no json, jsonl, csv, parquet or arrow file",
        "trimtab serve-rm: error: --reward_pretrain hollow: no config.json in this folder; is it a Hugging Face model?",
    ]
    assert ended.returncode == 0


def test_a_switch_that_does_nothing_on_a_cpu_is_said_to(monkeypatch, capsys):
    asks = SFTOptions(pretrain="owner/model", dataset="owner/data", flash_attn=True)
    monkeypatch.setattr("trimtab.job._accelerators", lambda: 0)
    prepared(asks)
    assert capsys.readouterr().err == (
        "trimtab sft: warning: --flash_attn has no effect on a CPU: attention is torch's own there\n"
    )
    monkeypatch.setattr("trimtab.job._accelerators", lambda: 1)
    prepared(asks)
    assert capsys.readouterr().err == ""


COMMAND = """
import sys
from trimtab.cli.main import main

code = main(["sft", "--pretrain", "owner/model", "--dataset", "owner/data", *sys.argv[1:]])
print("torch" in sys.modules)
sys.exit(code)
"""


@pytest.mark.parametrize("more, flag", [([], "save_path"), (["--save_path", "b", "--load_checkpoint"], "ckpt_path")])
def test_a_folder_in_use_is_refused_before_torch_is_imported(tmp_path, monkeypatch, more, flag):
    monkeypatch.chdir(tmp_path)
    words = ["--save_path", "a", "--ckpt_path", "a", *more]
    with locked("save_path", tmp_path / "a"):
        done = subprocess.run([sys.executable, "-c", COMMAND, *words], capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout == "False\n"
    told = f"--{flag} a: another run is at work there (process {os.getpid()} on"
    assert done.stderr.count("\n") == 1 and told in done.stderr


# ---- a run that fails


def failing(monkeypatch, message: str) -> None:
    def train_supervised(options):
        raise RuntimeError(message)

    monkeypatch.setattr(job, "job_function", lambda options: train_supervised)
    monkeypatch.setattr(job, "watch", lambda seconds: None)


@pytest.mark.parametrize("size, kind", [("2", RunFailed), ("1", RuntimeError)])
def test_a_broken_connection_of_several_processes_is_told_in_a_line(monkeypatch, tmp_path, size, kind):
    monkeypatch.setenv("WORLD_SIZE", size)
    monkeypatch.delenv(LAUNCHER_SOCKET, raising=False)
    failing(monkeypatch, "[pair.cc:537] Read error [127.0.0.1]: Connection reset by peer. Check the remote worker.")
    options = SFTOptions(pretrain="model", dataset="data", save_path=str(tmp_path))
    with pytest.raises(kind) as raised:
        job.start_job(options, [])
    if size == "2":
        assert str(raised.value) == (
            "another process of this run has ended, and its own output says why ([pair.cc:537] Read error [127.0.0.1]: "
            "Connection reset by peer); this run has no checkpoint to go on from"
        )


def test_python_raises_what_the_launcher_says_of_a_killed_process():
    hearing = ProcessOutput("grpo")
    hearing("trimtab grpo: failed: lost its connection to another process of this run", True)
    hearing("process 1 was ended by signal 9 (SIGKILL)", True)
    hearing("the last checkpoint is here", True)
    with pytest.raises(RunFailed, match=r"^process 1 was ended by signal 9 \(SIGKILL\); the last checkpoint is here$"):
        hearing.check(137)


def test_a_mistake_is_raised_though_another_process_tells_later_that_it_lost_its_connection():
    hearing = ProcessOutput("sft")
    hearing("process 1 ended with exit code 2:", True)
    hearing("  trimtab sft: error: no column 'nothing'", True)
    hearing("trimtab sft: failed: lost its connection to another process of this run (closed by peer)", True)
    with pytest.raises(UserError, match="no column 'nothing'"):
        hearing.check(2)
    with pytest.raises(RunFailed, match="lost its connection"):
        hearing.check(1)
