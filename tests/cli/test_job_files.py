import os
import shlex
import subprocess

import pytest

from trimtab.cli.main import main

COMMAND = "trimtab sft --pretrain a/b --dataset data.jsonl --learning_rate 1e-4"


def words(text):
    return ["jobs", *shlex.split(text)]


def test_files_for_every_seed_and_setting_are_written_and_are_valid_shell(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(words(f"--seeds 1-2,9 --vary learning_rate=1e-4,2e-4 --gpus 4 -- {COMMAND}")) == 0
    paths = capsys.readouterr().out.split()
    assert len(paths) == 7 and paths[-1] == "jobs/start_all.sh"
    for path in paths:
        assert os.access(path, os.X_OK)
        subprocess.run(["bash", "-n", path], check=True)
    text = (tmp_path / "jobs" / "train_sft_learning_rate2e-4_s9.sbatch").read_text()
    assert text.startswith("#!/bin/bash\n#SBATCH --job-name=train_sft_learning_rate2e-4_s9\n")
    assert "--learning_rate 2e-4 --seed 9" in text and f"\ncd {tmp_path}\n" in text


def test_a_shell_file_runs_its_command_where_it_was_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "echoing.py").write_text("import os, sys\nprint(os.getcwd(), *sys.argv[1:])\n")
    assert main(words("--seeds 4 --shell --name e --output files -- python -m echoing --ckpt 'my run_s{seed}'")) == 0
    env = {**os.environ, "PATH": f"{os.path.dirname(os.sys.executable)}:{os.environ['PATH']}"}
    done = subprocess.run([tmp_path / "files" / "start_all.sh"], capture_output=True, text=True, cwd="/", env=env)
    assert done.stdout == f"{tmp_path} --ckpt my run_s4 --seed 4\n", done.stderr


@pytest.mark.parametrize(
    "text, complaint",
    [
        ("--seeds 1-2", "there is no command"),
        (f"--seeds one -- {COMMAND}", "--seeds one: give numbers"),
        (f"--seeds 1,1 -- {COMMAND}", "every seed once"),
        (f"--vary alpha -- {COMMAND}", "--vary alpha: write NAME=VALUE"),
        (f"--vary learning_rat=1 -- {COMMAND}", "did you mean --learning_rate"),
        (f"--shell --nodes 2 -- {COMMAND}", "one machine"),
        (f"--sees 1 -- {COMMAND}", "unrecognized arguments"),
    ],
)
def test_a_mistake_is_one_line_before_anything_is_written(tmp_path, monkeypatch, capsys, text, complaint):
    monkeypatch.chdir(tmp_path)
    assert main(words(text)) == 2
    err = capsys.readouterr().err
    assert err.startswith("trimtab jobs: error: ") and err.count("\n") == 1 and complaint in err
    assert not any(tmp_path.iterdir())
