"""The Slurm file that `trimtab jobs` writes for a command on Ray, run for real: only Slurm's own programs are
stand-ins, which run on this machine what they would run on others."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.train.job_run import write_model, write_rows
from trimtab.cli.main import main
from trimtab.embedded.sort_task import make_rows, prompt_of, reference_of
from trimtab.train.metrics import read_rows

STAND_INS = {
    "srun": '#!/bin/bash\nwhile [[ $1 == --* ]]; do shift; done\nexec "$@"\n',
    "scontrol": "#!/bin/bash\nprintf 'one\\ntwo\\n'\n",
    "hostname": "#!/bin/bash\necho 127.0.0.1\n",
}
# Whatever is started ends with its first process, Ray finds no other one on this machine, and nobody else finds it.
ALONE = ["unshare", "--pid", "--net", "--fork", "--mount-proc", "--kill-child"]


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_model(Path("model"))
    rows = [{"input": prompt_of(row), "label": reference_of(row)} for row in make_rows(64, seed=1)]
    write_rows(Path("prompts.jsonl"), rows)
    for name, text in STAND_INS.items():
        Path("bin", name).parent.mkdir(exist_ok=True)
        Path("bin", name).write_text(text)
        Path("bin", name).chmod(0o755)
    return tmp_path


def start(place: Path, ray_folder: Path) -> subprocess.Popen:
    path = f"{place}/bin:{os.path.dirname(sys.executable)}:{os.environ['PATH']}"
    environment = os.environ | {
        "PATH": path,
        "PYTHONPATH": str(Path(__file__).parents[2]),
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "[one-two]",
        "RAY_TMPDIR": str(ray_folder),
        "OMP_NUM_THREADS": "1",
    }
    environment.pop("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", None)  # it would allow one node alone
    words = [*ALONE, "bash", "-c", 'ip link set lo up; exec bash "$0"', str(place / "jobs" / "train_grpo_s1.sbatch")]
    with open(place / "log", "ab") as log:
        return subprocess.Popen(words, env=environment, stdout=log, stderr=log, cwd="/")


@pytest.mark.long
@pytest.mark.skipif(os.geteuid() != 0, reason="namespaces need root")
def test_a_slurm_file_starts_ray_saves_when_told_goes_on_and_leaves_nothing(place):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = f"""jobs --nodes 2 --gpus 0 --cpus 4 --port {port} -- trimtab grpo --ray --nproc 2
        --pretrain {place}/model --prompt_data {place}/prompts.jsonl --input_key input --label_key label
        --reward_verifier exact --prompt_max_len 32 --generate_max_len 8 --rollout_batch_size 4 --n_samples_per_prompt 2
        --train_batch_size 8 --max_samples 16 --init_kl_coef 0 --max_steps 3 --load_checkpoint
        --save_path {place}/run --ckpt_path {place}/checkpoints"""
    assert main(command.split()) == 0
    ray_folder = Path("/tmp") / f"tt{port}"  # short, because the paths of sockets have a limit
    ray_folder.mkdir()
    try:
        first = start(place, ray_folder)
        rows = place / "run" / "metrics.jsonl"
        deadline = time.monotonic() + 300
        while not (rows.is_file() and rows.read_text().count("\n")):
            assert first.poll() is None and time.monotonic() < deadline, (place / "log").read_text()
            time.sleep(0.05)
        token = place / "ray-7" / "token"
        assert token.stat().st_mode & 0o777 == 0o600 and len(token.read_text()) == 64
        shell = int(Path(f"/proc/{first.pid}/task/{first.pid}/children").read_text().split()[0])
        os.kill(shell, signal.SIGTERM)  # what Slurm does before the time is over
        told = first.wait(timeout=120)
        log = (place / "log").read_text()
        assert told in (0, 143), log
        assert told == 0 or (place / "checkpoints").is_dir()
        assert not (place / "ray-7").exists()
        assert start(place, ray_folder).wait(timeout=300) == 0, (place / "log").read_text()
    finally:
        shutil.rmtree(ray_folder, ignore_errors=True)
    assert [row["step"] for row in read_rows(rows)] == [1, 2, 3]
    assert (place / "run" / "model.safetensors").is_file()
