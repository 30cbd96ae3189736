"""A Ray that a run has started: who can read its token, which lets one run code, and whether it ends with the run."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ALONE = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
ROOT = Path(__file__).parents[2]
NOBODY = 65534
SCRIPT = """
import os, pathlib, subprocess
from trimtab.distributed.ray.launcher import connected

with connected():
    import ray
    from ray._raylet import AuthenticationMode, get_authentication_mode

    assert get_authentication_mode() == AuthenticationMode.TOKEN, "anybody on this machine could use it"
    worker = ray.get(ray.remote(lambda: os.getpid()).remote())
    environment = pathlib.Path(f"/proc/{worker}/environ")
    assert os.environ["RAY_AUTH_TOKEN"].encode() in environment.read_bytes()
    found = subprocess.run(["cat", environment], user=NOBODY, group=NOBODY, capture_output=True)
    assert found.returncode != 0 and not found.stdout
    session = ray._private.worker._global_node.get_session_dir_path()
    looked = ["grep", "-rls", os.environ["RAY_AUTH_TOKEN"], session, os.environ["HOME"]]
    assert not subprocess.run(looked, capture_output=True).stdout, "it lies in a file"
"""


KILLED = """
import os, subprocess, sys, time

driver = '''
import os, time
from trimtab.distributed.ray.launcher import connected

class Worker:
    def process(self):
        return os.getpid()

with connected():
    import ray

    worker = ray.remote(Worker).remote()
    print(ray.get(worker.process.remote()), flush=True)
    time.sleep(600)
'''
started = subprocess.Popen([sys.executable, "-c", driver], stdout=subprocess.PIPE, text=True)
worker = int(started.stdout.readline())
os.kill(worker, 0)
started.kill()
deadline = time.monotonic() + 30
while os.path.exists(f"/proc/{worker}") and open(f"/proc/{worker}/stat").read().rsplit(")")[1].split()[0] != "Z":
    assert time.monotonic() < deadline, "it lives on, with all the memory that it has"
    time.sleep(0.1)
"""


def can_be_alone() -> bool:
    return os.geteuid() == 0 and subprocess.run([*ALONE, "true"], capture_output=True).returncode == 0


pytestmark = pytest.mark.skipif(not can_be_alone(), reason="needs root, for a PID namespace and another user")


def run_alone(script: str, home: Path) -> None:
    """`script` must not fail. Ray is in a PID namespace, with which all that is left of it ends."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment |= {"HOME": str(home), "PYTHONPATH": str(ROOT)}
    done = subprocess.run([*ALONE, sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def test_no_other_user_can_read_the_token(tmp_path):
    tmp_path.chmod(0o755)
    run_alone(SCRIPT.replace("NOBODY", str(NOBODY)), tmp_path)
    assert not (tmp_path / ".ray").exists()


@pytest.mark.long
def test_workers_end_soon_after_a_driver_that_was_killed(tmp_path):
    run_alone(KILLED, tmp_path)
