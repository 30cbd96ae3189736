"""Whoever has a Ray's token can run code as its owner: who can read that of a Ray that a run has started?"""

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
from trimtab.distributed.cluster.connect import connected

with connected():
    import ray
    from ray._raylet import AuthenticationMode, get_authentication_mode

    assert get_authentication_mode() == AuthenticationMode.TOKEN, "anybody on this machine could use it"
    worker = ray.get(ray.remote(os.getpid).remote())
    environment = pathlib.Path(f"/proc/{worker}/environ")
    assert os.environ["RAY_AUTH_TOKEN"].encode() in environment.read_bytes()
    found = subprocess.run(["cat", environment], user=NOBODY, group=NOBODY, capture_output=True)
    assert found.returncode != 0 and not found.stdout
    session = ray._private.worker._global_node.get_session_dir_path()
    looked = ["grep", "-rls", os.environ["RAY_AUTH_TOKEN"], session, os.environ["HOME"]]
    assert not subprocess.run(looked, capture_output=True).stdout, "it lies in a file"
"""


def can_be_alone() -> bool:
    return os.geteuid() == 0 and subprocess.run([*ALONE, "true"], capture_output=True).returncode == 0


@pytest.mark.skipif(not can_be_alone(), reason="needs root: another user looks, and Ray stays in a PID namespace")
def test_no_other_user_can_read_the_token_of_a_run_s_own_ray(tmp_path):
    tmp_path.chmod(0o755)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment |= {"HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    script = SCRIPT.replace("NOBODY", str(NOBODY))
    done = subprocess.run([*ALONE, sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert not (tmp_path / ".ray").exists()
