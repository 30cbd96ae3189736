"""Programs in a jail, with namespaces and without."""

import os
import sys
from pathlib import Path

import pytest

from trimtab.sandbox import jail
from trimtab.sandbox.jail import Isolation, JailedProgram, ProgramLimits, isolation

LIMITED = Isolation(namespaces=False, landlock=isolation().landlock or 7)
PYTHONS = [path for path in (jail.PYTHON, "/usr/bin/python3") if not path.startswith("/root") and Path(path).exists()]
EVERYBODYS = PYTHONS[0] if PYTHONS else None
WAYS = [
    pytest.param(Isolation(namespaces=True), marks=pytest.mark.skipif(not isolation().namespaces, reason="none here")),
    pytest.param(
        LIMITED,
        marks=pytest.mark.skipif(
            sys.platform != "linux" or EVERYBODYS is None or jail.LIBC.syscall(jail.LANDLOCK_CREATE, None, 0, 1) < 6,
            reason="no Landlock, or no Python that everybody may use",
        ),
    ),
]


@pytest.fixture(params=WAYS, ids=["namespaces", "limits"])
def run(request, monkeypatch):
    if not request.param.namespaces and os.geteuid() == 0:
        monkeypatch.setattr(jail, "PYTHON", EVERYBODYS)

    def output(code, stdin=b"", **limits):
        with JailedProgram(code, ProgramLimits(**limits), stdin=stdin, how=request.param) as program:
            return program.output()

    return output


def test_output_and_input(run):
    assert run("print(input()[::-1])", b"abc") == b"cba\n"
    assert run("raise SystemExit(3)") is None and run("print('x' * 200)", output_bytes=100) is None
    assert run("while True: pass", seconds=0.3) is None and run("import time; time.sleep(9)", seconds=0.3) is None
    assert run("x = bytearray(2**30)") is None


def test_it_reaches_neither_files_nor_network_nor_processes(run, tmp_path):
    tmp_path.chmod(0o777)
    (tmp_path / "mine").write_text("secret")
    (tmp_path / "mine").chmod(0o666)
    attempts = {
        "write": f"open({str(tmp_path / 'new')!r}, 'w')",
        "change": f"open({str(tmp_path / 'mine')!r}, 'w')",
        "remove": f"import os; os.remove({str(tmp_path / 'mine')!r})",
        "signal": f"import os; os.kill({os.getpid()}, 0)",
        "connect": "import socket; socket.create_connection(('127.0.0.1', 1), 1)",
    }
    for what, code in attempts.items():
        tried = f"try:\n    {code}\n    print('done')\nexcept OSError as error:\n    print(error.errno)"
        found = run(tried)
        assert (found is not None and found != b"done\n" and found != b"111\n") or what == "connect", (what, found)
        assert found != b"done\n"
    assert [path.name for path in tmp_path.iterdir()] == ["mine"] and (tmp_path / "mine").read_text() == "secret"


def test_this_system_says_what_it_isolates():
    assert "isolated" in str(isolation()) and "reading files" in str(LIMITED)
    assert "network except TCP" in str(LIMITED) and "the network" in str(Isolation(False))
