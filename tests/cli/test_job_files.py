import os
import re
import shlex
import subprocess

import pytest

from tests.config.test_repulse_aliases import COMMANDS

COMMAND = "trimtab sft --pretrain a/b --dataset data.jsonl --learning_rate 1e-4"


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_files_for_every_seed_and_setting_are_written_and_are_valid_shell(tmp_path, trimtab):
    paths = trimtab(f"jobs --seeds 1-2,9 --vary learning_rate=1e-4,2e-4 --gpus 4 -- {COMMAND}").said.split()
    assert len(paths) == 7 and paths[-1] == "jobs/start_all.sh"
    for path in paths:
        assert os.access(path, os.X_OK)
        subprocess.run(["bash", "-n", path], check=True)
    text = (tmp_path / "jobs" / "train_sft_learning_rate2e-4_s9.sbatch").read_text()
    assert text.startswith("#!/bin/bash\n#SBATCH --job-name=train_sft_learning_rate2e-4_s9\n")
    assert "--learning_rate 2e-4 --seed 9" in text and f"\ncd {tmp_path}\n" in text


def test_a_shell_file_runs_its_command_where_it_was_written(tmp_path, trimtab):
    (tmp_path / "echoing.py").write_text("import os, sys\nprint(os.getcwd(), *sys.argv[1:])\n")
    command = "python -m echoing --ckpt 'my run_s{seed}'"
    assert trimtab(f"jobs --seeds 4 --shell --name e --output files -- {command}").code == 0
    env = {**os.environ, "PATH": f"{os.path.dirname(os.sys.executable)}:{os.environ['PATH']}"}
    done = subprocess.run([tmp_path / "files" / "start_all.sh"], capture_output=True, text=True, cwd="/", env=env)
    assert done.stdout == f"{tmp_path} --ckpt my run_s4 --seed 4\n", done.stderr


@pytest.mark.parametrize(
    "text, complaint",
    [
        ("--seeds 1-2", "there is no command"),
        (f"--seeds one -- {COMMAND}", "--seeds one: give numbers"),
        (f"--seeds 1,1 -- {COMMAND}", "every seed once"),
        (f"--seeds 5-2 -- {COMMAND}", "--seeds 5-2: 5-2 goes backwards; write 2-5"),
        (f"--seeds 1-2 {COMMAND}", "there is no command: write it after --"),
        (f"--vary alpha -- {COMMAND}", "--vary alpha: write NAME=VALUE"),
        (f"--vary learning_rat=1 -- {COMMAND}", "did you mean --learning_rate"),
        (f"--vary alpha=1 --vary alpha=2 -- {COMMAND}", "alpha is varied already"),
        (f"--vary seed=1,2 -- {COMMAND}", "--seeds says that"),
        (f"--seeds 1-3 -- {COMMAND} --save_path same", "--save_path same: several of the 3 jobs would write there"),
        (f"--gpus -1 -- {COMMAND}", "--gpus is -1: it must be at least 0"),
        (f"--nodes 0 -- {COMMAND}", "--nodes is 0: it must be at least 1"),
        (f"--shell --nodes 2 -- {COMMAND}", "one machine"),
        (f"--sees 1 -- {COMMAND}", "unrecognized arguments"),
        ("-- python3 -m trimtab.cli.train_ppo_ray --pretrian a", "did you mean --pretrain?"),
    ],
)
def test_a_mistake_is_one_line_before_anything_is_written(tmp_path, trimtab, text, complaint):
    assert complaint in trimtab(f"jobs {text}").mistake
    assert not any(tmp_path.iterdir())


STARTS = ("--module trimtab.cli.train_ppo", "deepspeed --master_port 39225 --module trimtab.cli.train_ppo")


@pytest.mark.parametrize("start", [*STARTS, "python -m trimtab.cli.train_ppo", "trimtab ppo"])
def test_every_training_command_of_repulse_gets_its_files_with_nothing_changed_but_the_seed(tmp_path, trimtab, start):
    commands = COMMANDS if start == STARTS[0] else COMMANDS[::7]  # how they are started is no matter of their words
    for number, (command, *_) in enumerate(commands):
        typed, folder = command.split(), tmp_path / str(number)
        done = trimtab(f"jobs --seeds 2,3 --shell --output {folder} -- {start}", *typed)
        assert done.code == 0 and done.err == ""
        for seed in "23":
            typed[typed.index("--seed") + 1] = seed
            (line,) = (folder / f"train_ppo_s{seed}.sh").read_text().splitlines()[3:]
            assert shlex.split(line) == ["python", "-m", "trimtab.cli.train_ppo", *typed]


@pytest.mark.parametrize(
    "extra, complaint",
    [("--save_step 1", "did you mean --save_steps?"), ("--rm_type toxicity", "the only potential"), ("--lr 1", "--lr")],
)
def test_a_mistake_in_a_command_of_repulse_is_told_before_anything_is_written(tmp_path, trimtab, extra, complaint):
    command = COMMANDS[18][0].replace("--rm_type rlhf", "")
    done = trimtab(f"jobs --output {tmp_path}/jobs -- {STARTS[0]} {command} {extra}")
    assert done.code == 2 and complaint in done.err and not any(tmp_path.iterdir())


def test_every_job_writes_into_folders_of_its_own(tmp_path, trimtab):
    own = "jobs --shell --seeds 1-2 --vary learning_rate=1e-3,2e-3 --output made"
    command = "trimtab sft --pretrain m --dataset d --save_path out/{learning_rate}-{seed}"
    assert trimtab(f"{own} -- {command}").code == 0
    texts = [path.read_text() for path in sorted((tmp_path / "made").glob("train_sft*"))]
    places = [re.search(r"--save_path (\S+)", text).group(1) for text in texts]
    assert places == ["out/1e-3-1", "out/1e-3-2", "out/2e-3-1", "out/2e-3-2"]
    assert all("--ckpt_path" not in text for text in texts), "checkpoints lie in the run's own folder"


def test_the_file_that_starts_all_says_which_failed(tmp_path, trimtab):
    assert trimtab(f"jobs --shell --seeds 1-2 -- {COMMAND}").code == 0
    first, second, start = sorted((tmp_path / "jobs").iterdir(), key=lambda path: path.name == "start_all.sh")
    first.write_text("exit 3\n")
    second.write_text("echo done\n")
    done = subprocess.run(["bash", start], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "done\n") and done.stderr == f"{first.name} has failed\n"
