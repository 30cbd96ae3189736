"""Programs in a jail, with namespaces and without."""

import os
import signal
import sys
import time
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


def test_a_jail_that_cannot_be_built_is_no_failure_of_the_program(monkeypatch):
    monkeypatch.setattr(jail, "PYTHON", "/no/such/python")
    with pytest.raises(OSError, match="no jail for a program could be built: FileNotFoundError"):
        JailedProgram("print(1)", ProgramLimits(), how=isolation())


@pytest.mark.skipif(not isolation().namespaces, reason="no namespaces here")
def test_namespaces_that_cannot_be_entered_are_an_error(monkeypatch):
    def fail():
        raise OSError(12, "no memory for mounts")

    monkeypatch.setattr(jail, "_change_root", fail)
    with pytest.raises(OSError, match="no memory for mounts"):
        JailedProgram("print(1)", ProgramLimits())


def test_a_private_umask_closes_nothing_to_the_program(run):
    before = os.umask(0o077)
    try:
        assert run("import os; print(len(os.listdir('/usr')) > 1, oct(os.umask(0)))") == b"True 0o22\n"
    finally:
        os.umask(before)


@pytest.mark.skipif(not isolation().namespaces, reason="no namespaces here")
def test_a_jail_that_ends_while_it_is_built_ends_what_it_has_started(monkeypatch):
    stand_by, begin = jail._stand_by, JailedProgram._begin
    monkeypatch.setattr(jail, "_stand_by", lambda *given, **how: (time.sleep(0.5), stand_by(*given, **how)))
    monkeypatch.setattr(JailedProgram, "_begin", lambda *given: (time.sleep(0.3), begin(*given)))
    program = JailedProgram("import time; time.sleep(60)", ProgramLimits(seconds=0.1))
    program.close()
    assert program._code == 128 + signal.SIGKILL, "its handler has run"
    assert signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, ()), "signals of this process are as before"


def test_this_system_says_what_it_isolates():
    assert "isolated" in str(isolation()) and "reading files" in str(LIMITED)
    assert "network except TCP" in str(LIMITED) and "the network" in str(Isolation(False))
