import shlex
import subprocess

import pytest

from trimtab.config.job_file import Command, Machines, read_command, shell_file, slurm_file, spread
from trimtab.errors import UserError

VERBS = {"tail": "trimtab.cli.train_tail", "attack": "trimtab.cli.attack"}
OPTIONS = "--pretrain a/b --adam_betas 0.9 0.999 --bf16 --target_dist_beta -10 --seed 1"


@pytest.mark.parametrize(
    "typed",
    [
        f"trimtab tail {OPTIONS}",
        f"python -m trimtab.cli.train_tail {OPTIONS}",
        f"deepspeed --master_port 39225 --module trimtab.cli.train_tail {OPTIONS}",
        f"torchrun --nproc_per_node 4 -m trimtab.cli.train_tail {OPTIONS}",
        f"--module trimtab.cli.train_tail {OPTIONS.replace('--seed 1', '--seed=1')}",
    ],
)
def test_every_way_to_type_a_command_means_the_same(typed):
    command = read_command(shlex.split(typed), VERBS)
    assert command.module == "trimtab.cli.train_tail"
    assert dict(command.options)["adam_betas"] == ("0.9", "0.999")
    assert dict(command.options)["target_dist_beta"] == ("-10",) and dict(command.options)["bf16"] == ()
    assert shlex.join(command.words()) == OPTIONS


def test_a_seed_is_set_where_it_stands_and_nowhere_else():
    typed = "trimtab attack --ckpt_path /c/run_s{seed}_harml_actor --seed 1 --file_path seed_1.csv --gcg_steps 1"
    words = read_command(shlex.split(typed), VERBS).filled({"seed": "12"}).words()
    assert words == shlex.split("--ckpt_path /c/run_s12_harml_actor --seed 12 --file_path seed_1.csv --gcg_steps 1")
    assert Command("m", (("a", ()),)).filled({"seed": "3"}).words() == ["--a", "--seed", "3"]


def test_every_job_has_its_own_name_seed_settings_and_port():
    command = read_command(shlex.split(f"trimtab tail {OPTIONS}"), VERBS)
    jobs = spread(command, "toy", [5, 7], {"alpha": ["0.1", "1"], "target_dist_beta": ["-10"]}, 30_000)
    assert [(job.name, job.port) for job in jobs] == [
        ("toy_alpha0.1_target_dist_beta-10_s5", 30_000),
        ("toy_alpha0.1_target_dist_beta-10_s7", 30_001),
        ("toy_alpha1_target_dist_beta-10_s5", 30_002),
        ("toy_alpha1_target_dist_beta-10_s7", 30_003),
    ]
    assert [dict(job.command.options)["seed"] for job in jobs] == [("5",), ("7",)] * 2
    assert dict(jobs[2].command.options)["alpha"] == ("1",)


def one_job(values="--text 'two words'"):
    return spread(read_command(shlex.split(f"trimtab tail {values}"), VERBS), "toy", [3], {}, 31_000)[0]


def test_one_accelerator_needs_no_launcher_and_several_share_a_port():
    last = shell_file(one_job(), Machines()).splitlines()[-1]
    assert last == "python -m trimtab.cli.train_tail --text 'two words' --seed 3"
    last = shell_file(one_job(), Machines(gpus=4), ["source env/bin/activate"]).splitlines()[-2:]
    assert last[0] == "source env/bin/activate"
    assert shlex.split(last[1])[:7] == shlex.split(
        "torchrun --nproc_per_node 4 --master_port 31000 --module trimtab.cli.train_tail"
    )


def test_a_slurm_header_says_what_was_asked_and_no_more():
    text = slurm_file(one_job(), Machines(memory="48G", time="05:00:00", others={"qos": "high"}))
    header = dict(line.removeprefix("#SBATCH --").split("=") for line in text.splitlines() if "#SBATCH" in line)
    assert header == {
        **{"job-name": "toy_s3", "output": "toy_s3_%j.out", "nodes": "1", "ntasks-per-node": "1"},
        **{"gpus-per-node": "1", "cpus-per-task": "4", "mem": "48G", "time": "05:00:00", "qos": "high"},
        "signal": "B:TERM@120",
    }


def test_several_nodes_meet_at_the_first():
    text = slurm_file(one_job(), Machines(nodes=2, gpus=8))
    assert "#SBATCH --nodes=2" in text and "#SBATCH --gpus-per-node=8" in text
    assert "#SBATCH --signal=TERM@120" in text, "the launchers are told; the shell would not tell them"
    last = text.splitlines()[-1]
    assert last.startswith("srun torchrun --nnodes 2 --nproc_per_node 8 ")
    assert '--rdzv_endpoint "$first_node:31000"' in last
    assert last.endswith("--module trimtab.cli.train_tail --text 'two words' --seed 3")


def test_a_long_list_of_nodes_is_no_broken_pipe(tmp_path):
    for name, text in {"scontrol": "seq -f 'node%g' 100000", "srun": 'echo "$@"'}.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_NODELIST": "", "SLURM_JOB_ID": "7"}
    done = subprocess.run(
        ["bash"], input=slurm_file(one_job(), Machines(nodes=2)), env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "--rdzv_endpoint node1:31000" in done.stdout


@pytest.mark.parametrize(
    "typed, complaint",
    [
        ("trimtab tial --seed 1", "trimtab tial is not a verb"),
        ("train.py --seed 1", "not understood"),
        ("deepspeed train.py --seed 1", "not understood"),
        ("trimtab tail 5 --seed 1", "unexpected '5'"),
        ("trimtab tail --seed 1 --seed 2", "--seed stands twice"),
        ("deepspeed --module openrlhf.cli.train_ppo --seed 1", "write trimtab.cli.train_ppo"),
    ],
)
def test_a_command_that_is_not_understood_is_one_line(typed, complaint):
    with pytest.raises(UserError, match=complaint):
        read_command(shlex.split(typed), VERBS)


def test_names_and_ports_stay_within_bounds():
    command = Command("m", ())
    with pytest.raises(UserError, match="--port 65535"):
        spread(command, "toy", [1, 2], {}, 65_535)
    for name, varied in (("a/b", {}), ("toy", {"x": ["y" * 300]})):
        with pytest.raises(UserError, match="cannot be called"):
            spread(command, name, [1], varied, 30_000)


def test_one_node_becomes_the_command_so_that_slurms_warning_reaches_it():
    assert slurm_file(one_job(), Machines()).splitlines()[-1].startswith("exec python -m ")


@pytest.mark.parametrize(
    ("typed", "on_ray"),
    [
        ("python -m trimtab.cli.train_ppo_ray --pretrain a", True),
        ("python -m trimtab.cli.train_ppo_ray --ray False", False),
        ("trimtab tail --ray --pretrain a", True),
        ("trimtab tail --pretrain a --ray True", True),
        ("trimtab tail --pretrain a", False),
    ],
)
def test_a_command_on_ray_is_known_by_its_module_or_option(typed, on_ray):
    assert read_command(shlex.split(typed), VERBS).on_ray == on_ray


@pytest.mark.parametrize("nodes", [1, 3])
def test_a_command_on_ray_gets_a_ray_of_its_own_with_a_token(tmp_path, nodes):
    text = slurm_file(one_job("--ray --text 'two words'"), Machines(nodes=nodes, gpus=8, cpus=16), ["cd /here"])
    (tmp_path / "file").write_text(text)
    subprocess.run(["bash", "-n", str(tmp_path / "file")], check=True)
    assert "#SBATCH --signal=B:TERM@120" in text and "torchrun" not in text
    assert "export RAY_AUTH_MODE=token" in text and 'chmod 600 "$RAY_AUTH_TOKEN_PATH"' in text
    assert "--port=31000 --include-dashboard=false --num-gpus=8 --num-cpus=16" in text
    assert ("--nodes=2 --ntasks=2 --exclude" in text) == ("wait_for 3" in text) == (nodes == 3)
    assert "\npython -m trimtab.cli.train_tail --ray --text 'two words' --seed 3 &\n" in text
    assert shell_file(one_job("--ray"), Machines(gpus=4)).splitlines()[-1].startswith("python -m ")
