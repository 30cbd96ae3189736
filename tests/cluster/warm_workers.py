"""Ray's worker processes, forked from one warm parent: to import torch and transformers in each costs twelve seconds.

Raylets start a worker with the interpreter of whoever started them. Here that is a small program of ours: it hands the
worker's words, environment, output and namespaces over to the warm parent, which forks, runs Ray's own worker in the
child, and stays until that ends. Other commands, and workers with a working folder of their own, get the real
interpreter. What a test wants to be done in every worker first, it says with `prepare`.
"""

import array
import ctypes
import json
import os
import pickle
import runpy
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path

from tests import warm

LAUNCHER = """#!{python} -IS
import array, json, os, socket, sys
worker = [word for word in sys.argv[1:3] if word.endswith("workers/default_worker.py")]
context = [word.partition("=")[2] for word in sys.argv if word.startswith("--serialized-runtime-env-context=")]
context = json.loads(context[0]) if context else {{}}
if not worker or context.get("command_prefix"):
    os.execv("{python}", ["{python}", *sys.argv[1:]])
words = [word for word in sys.argv[1:] if "setup_worker.py" not in word]
words = [word for word in words if not word.startswith(("--serialized-runtime-env-context=", "--language="))]
environment = dict(os.environ) | context.get("env_vars", {{}})
line = socket.socket(socket.AF_UNIX)
line.connect("{socket}")
request = json.dumps([words, environment, os.getcwd()]).encode()
namespaces = [os.open("/proc/self/ns/" + kind, os.O_RDONLY) for kind in ("net", "pid", "mnt")]
carried = array.array("i", [0, 1, 2, *namespaces])
line.sendmsg([len(request).to_bytes(4, "big")], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, carried)])
line.sendall(request)
line.recv(1)  # nothing ever comes but the end
"""


class WarmWorkers:
    def __init__(self, folder: Path):
        self.interpreter, self._prepared = folder / "python", folder / "prepared"
        place = folder / "warm"
        self.interpreter.write_text(LAUNCHER.format(python=sys.executable, socket=place))
        self.interpreter.chmod(0o700)
        self._parent = warm.start_call(serve, str(place), str(self._prepared))
        warm.wait_until(place.exists, self._parent)

    def prepare(self, what: Callable[[], None] | None) -> None:
        """What is done first in every worker that is started from now on; a function of a test module, or a part of
        one."""
        self._prepared.unlink(missing_ok=True)
        if what is not None:
            self._prepared.write_bytes(pickle.dumps(what))

    @property
    def parent(self) -> int:
        """The process whose children they are."""
        return self._parent.pid

    def close(self) -> None:
        self._parent.kill()
        self._parent.join()


def serve(place: str, prepared: str) -> None:
    assert "ray" not in sys.modules, "Ray reads the worker's environment when it is imported"
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody else would bury them
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(place + ".new")
    listening.listen(64)
    os.rename(place + ".new", place)
    while True:
        line, _ = listening.accept()
        header, control, *_ = line.recvmsg(4, socket.CMSG_SPACE(6 * array.array("i").itemsize))
        carried = array.array("i", control[0][2])
        if os.fork() == 0:
            listening.close()
            become_worker(line, int.from_bytes(header, "big"), list(carried), prepared)
        line.close()
        for descriptor in carried:
            os.close(descriptor)


def become_worker(line: socket.socket, size: int, carried: list[int], prepared: str) -> None:
    request = b""
    while len(request) < size:
        request += line.recv(size - len(request))
    words, environment, folder = json.loads(request)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for number, descriptor in enumerate(carried[:3]):
        os.dup2(descriptor, number)
    enter(*carried[3:])
    for descriptor in carried:
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.argv = words
    sys.path[0] = os.path.dirname(words[0])
    if os.path.exists(prepared):
        with open(prepared, "rb") as opened:
            pickle.load(opened)()
    try:
        runpy.run_path(words[0], run_name="__main__")
    except SystemExit as ended:
        os._exit(ended.code if isinstance(ended.code, int) else 1)
    os._exit(0)


def enter(*namespaces: int) -> None:
    """Go where the launcher is, if that is elsewhere."""
    here = [os.stat(f"/proc/self/ns/{kind}").st_ino for kind in ("net", "pid", "mnt")]
    if here == [os.fstat(namespace).st_ino for namespace in namespaces]:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    for namespace in namespaces:
        if libc.setns(namespace, 0):
            raise OSError(ctypes.get_errno(), "setns")
    if child := os.fork():  # only children are in the other PID namespace
        os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) & 0xFF)
