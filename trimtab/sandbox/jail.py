"""Python programs that nobody trusts, such as a model's answers: each in a fresh interpreter with limits.

Limits hold everywhere: processor seconds, memory of a process, open files, and no core files. What else a program
cannot reach depends on the system (`isolation`):

    namespaces   Linux, as root or where users may create namespaces. The program sees its own processes alone, no
                 network, and a file system of the system's libraries and the Python installation, read-only, with an
                 empty /tmp in memory. When it ends, everything that it has started ends with it.
    limits       elsewhere, as in most containers. It can start neither processes nor threads and cannot write files.
                 Landlock (Linux 5.13) also keeps it from creating and removing them, from TCP and from signals. It can
                 read whatever the user can; as root it runs as a user without rights.

`python -m trimtab.sandbox.jail` says which of them this system has. No group of processes has a limit on its memory: a
program with all of its processes may use `memory_mib` for each.
"""

import contextlib
import ctypes
import functools
import os
import resource
import select
import signal
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from trimtab.errors import UserError

LIBC = ctypes.CDLL(None, use_errno=True)
NEW_NAMESPACES = 0x00020000 | 0x20000000 | 0x40000000 | 0x08000000 | 0x04000000  # mounts, pids, network, IPC, host name
NEW_USER = 0x10000000
MS_BIND, MS_REC, MS_PRIVATE, MS_NOSUID, MS_NODEV = 4096, 16384, 1 << 18, 2, 4
MOUNT_SETATTR, LANDLOCK_CREATE, LANDLOCK_RESTRICT = 442, 444, 446  # system calls, the same on all processors
PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS = 1, 38
ROOT = "/proc"  # covered by the new root: no source of a mount lies in it
SYSTEM = ("/usr", "/lib", "/lib64", "/bin", "/etc/ld.so.cache", "/dev/null", "/dev/zero", "/dev/urandom")
SCRATCH_MIB = 16
NOBODY = range(20_000, 60_000)  # one of them for each worker: processes are counted per user
PYTHON = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
SECONDS_TO_END = 5.0
# The code comes in descriptor 3, so that no argument is too long.
BOOT = "import os; exec(compile(open(3, encoding='utf-8').read(), 'program.py', 'exec'), {'__name__': '__main__'})"


@dataclass(frozen=True)
class ProgramLimits:
    """Limits of one program."""

    processor_seconds: int = 4
    seconds: float = 10.0
    memory_mib: int = 512
    processes: int = 8
    """With namespaces; without them a program cannot start any."""
    output_bytes: int = 2**20


@dataclass(frozen=True)
class Isolation:
    """What this system keeps programs from, apart from limits."""

    namespaces: bool
    landlock: int = 0
    """Version of the interface; 0: there is none."""

    def __str__(self) -> str:
        if self.namespaces:
            return "isolated by namespaces: no network, no files of yours, no other processes"
        own = os.geteuid() != 0
        lacking = {
            "reading files" if own else "reading files that everybody may": True,
            "the network" if self.landlock < 4 else "the network except TCP": True,
            "changing your files, sending signals" if own else "creating empty files": not self.landlock,
            "sending signals": own and 0 < self.landlock < 6,
        }
        found = ", ".join(what for what, is_lacking in lacking.items() if is_lacking)
        return f"NOT isolated (this system gives no namespaces; the rest is limited): {found}"


@functools.cache
def isolation() -> Isolation:
    """The best that works here, found out by running a program."""
    landlock = max(0, LIBC.syscall(LANDLOCK_CREATE, None, 0, 1)) if sys.platform == "linux" else 0
    namespaces = [Isolation(namespaces=True)] if hasattr(LIBC, "unshare") else []
    for how in [*namespaces, Isolation(False, landlock)]:
        with contextlib.suppress(OSError), JailedProgram("print(6 * 7)", ProgramLimits(), how=how) as program:
            if program.output() == b"42\n":
                return how
    raise UserError(
        f"programs cannot be run here: neither in namespaces nor as a user without rights, who may not use {PYTHON}; "
        "run as another user than root, or with a Python that everybody may use"
    )


class JailedProgram:
    """A program in its own process. Whatever it does, nothing of it is left after `close`.

    It is started by forks, so the calling process should have one thread.
    """

    def __init__(
        self,
        code: str,
        limits: ProgramLimits,
        *,
        stdin: bytes = b"",
        channel: bool = False,
        how: Isolation | None = None,
    ):
        """`channel`: the program gets a socket as descriptor 4 (here `socket`) in place of a standard output.
        OSError: the jail could not be built, which says nothing about the program."""
        self.limits, self._how = limits, how or isolation()
        self._deadline = time.monotonic() + limits.seconds
        self.socket, theirs = socket.socketpair()
        read, write = os.pipe()
        self._output, sink = read, os.open(os.devnull, os.O_WRONLY)
        source, given = _memory_file(code.encode(errors="replace")), _memory_file(stdin)
        self._code: int | None = None
        status, self._status = os.pipe()  # says why there is no jail; the program's start closes it
        places = [given, sink if channel else write, sink, source, theirs.fileno() if channel else sink, self._status]
        sys.stdout.flush()  # or the fork would have it twice
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # in the new process until it has handlers
        self._pid = os.fork()
        if self._pid == 0:
            try:
                self._begin(places)
            except BaseException as error:
                os.write(self._status, f"{type(error).__name__}: {error}".encode())
            finally:
                os._exit(1)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for descriptor in (write, sink, source, given, self._status):
            os.close(descriptor)
        theirs.close()
        problem = os.read(status, 2**12) if select.select([status], [], [], self.seconds_left)[0] else b""
        os.close(status)
        if problem:
            self.close()
            raise OSError(f"no jail for a program could be built: {problem.decode(errors='replace')}")

    def __enter__(self) -> "JailedProgram":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def seconds_left(self) -> float:
        return max(0.0, self._deadline - time.monotonic())

    def output(self) -> bytes | None:
        """Its standard output once it has ended well; None: it failed, printed too much or took too long."""
        found = b""
        while len(found) <= self.limits.output_bytes and select.select([self._output], [], [], self.seconds_left)[0]:
            part = os.read(self._output, 2**16)
            if not part:
                break
            found += part
        while self._code is None and self.seconds_left and len(found) <= self.limits.output_bytes:
            self._wait(os.WNOHANG)
            time.sleep(0.002 if self._code is None else 0)
        ended_well = self._code == 0 and len(found) <= self.limits.output_bytes
        self.close()
        return found if ended_well else None

    def close(self) -> None:
        """End it, and wait until everything that it has started has ended."""
        if self._output < 0:
            return
        if self._code is None and self._how.namespaces:
            os.kill(self._pid, signal.SIGTERM)
            deadline = time.monotonic() + SECONDS_TO_END
            while self._code is None and time.monotonic() < deadline:
                self._wait(os.WNOHANG)
                time.sleep(0.001 if self._code is None else 0)
        if self._code is None:
            os.kill(self._pid, signal.SIGKILL)
            self._wait(0)
        self.socket.close()
        os.close(self._output)
        self._output = -1

    def _wait(self, flags: int) -> None:
        pid, status = os.waitpid(self._pid, flags)
        if pid:
            self._code = os.waitstatus_to_exitcode(status)

    # ---- in the new process

    def _begin(self, places: Sequence[int]) -> None:
        os.setsid()
        os.umask(0o022)  # folders made in the new root are open to the program's user
        user, nobody = os.geteuid(), NOBODY[os.getppid() % len(NOBODY)]
        if sys.platform == "linux":
            _called(LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL))
            with open("/proc/self/oom_score_adj", "w") as file:
                file.write("1000")  # the first to go where memory is short
        if self._how.namespaces:
            _enter_namespaces(user)
            first = os.fork()
            if first:
                _stand_by(first, ends=True)
            _called(LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL))
            _change_root()
            program = os.fork()
            if program:  # this process is the namespace's init: when it ends, all others are killed
                _stand_by(program, ends=False)
        for place, descriptor in enumerate([os.dup(descriptor) for descriptor in places]):
            while descriptor < len(places):
                descriptor = os.dup(descriptor)
            os.dup2(descriptor, place, inheritable=place < 5)
        self._status = 5
        os.closerange(len(places), resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        self._limit(nobody if user == 0 else None)
        variables = {"PATH": "/usr/bin:/bin", "HOME": "/tmp", "LANG": "C.UTF-8", "PYTHONHASHSEED": "0"}
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        os.execve(PYTHON, [PYTHON, "-S", "-s", "-B", "-c", BOOT], variables)

    def _limit(self, user: int | None) -> None:
        """Set all limits; `user`: whose rights the program gets in place of this process's."""
        if user is not None:
            os.setgroups([])
            os.setresgid(user, user, user)
            os.setresuid(user, user, user)
        contained, memory = self._how.namespaces, self.limits.memory_mib * 2**20
        for name, value in {
            "CPU": self.limits.processor_seconds,
            "AS": memory,
            "DATA": memory,
            "NPROC": self.limits.processes if contained else 0,
            "FSIZE": SCRATCH_MIB * 2**20 if contained else 0,
            "NOFILE": 64,
            "CORE": 0,
        }.items():
            limit = getattr(resource, f"RLIMIT_{name}")
            ceiling = resource.getrlimit(limit)[1]
            value = value if ceiling == resource.RLIM_INFINITY else min(value, ceiling)
            resource.setrlimit(limit, (value, value))
        if sys.platform == "linux":
            _called(LIBC.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
        if not contained and sys.platform == "linux":
            _called(LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL))  # changing the user has cleared it
            _restrict(self._how.landlock)


def _memory_file(content: bytes) -> int:
    """A descriptor from which `content` can be read, and which is no file of the disk."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("program")
    else:
        import tempfile

        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    with open(descriptor, "wb", closefd=False) as writing:
        writing.write(content)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def _called(result: int) -> None:
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _enter_namespaces(user: int) -> None:
    group = os.getegid()
    _called(LIBC.unshare(NEW_NAMESPACES | (NEW_USER if user else 0)))
    if user:
        for name, text in {"setgroups": "deny", "uid_map": f"{user} {user} 1", "gid_map": f"{group} {group} 1"}.items():
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)


def _stand_by(child: int, *, ends: bool) -> None:
    """Wait for the child and exit with its code; `ends`: SIGTERM kills the child first. Orphans are reaped."""
    if ends:
        signal.signal(signal.SIGTERM, lambda *_: os.kill(child, signal.SIGKILL))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    os.closerange(0, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    while True:
        pid, status = os.wait()
        if pid == child:
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else 128 - code)


def _mount(source: str, place: str, kind: str | None, flags: int, data: str = "") -> None:
    texts = [None if text is None else text.encode() for text in (source, place, kind)]
    _called(LIBC.mount(*texts, ctypes.c_ulong(flags), data.encode()))


def _change_root() -> None:
    """A new root with the system's libraries and Python, read-only, and a /tmp in memory."""
    _mount("none", "/", None, MS_REC | MS_PRIVATE)
    python = os.path.realpath(sys.base_prefix)
    outside = [place for place in (*SYSTEM, python) if os.path.exists(place)]
    links = {place: os.readlink(place) for place in outside if os.path.islink(place)}
    _mount("tmpfs", ROOT, "tmpfs", MS_NOSUID, "size=1m,mode=755")
    for place in outside:
        inside = ROOT + place
        os.makedirs(os.path.dirname(inside), exist_ok=True)
        if place in links:
            os.symlink(links[place], inside)
        elif not os.path.exists(inside):  # Python may lie in /usr
            if os.path.isdir(place):
                os.mkdir(inside)
            else:
                os.close(os.open(inside, os.O_CREAT))
            _mount(place, inside, None, MS_BIND | MS_REC)
    os.makedirs(ROOT + "/tmp", exist_ok=True)
    # mount_setattr: read-only, without set-user-id files, and so everything that is mounted in it.
    attributes = (ctypes.c_uint64 * 4)(1 | 2, 0, 0, 0)
    _called(LIBC.syscall(MOUNT_SETATTR, -100, ROOT.encode(), 0x8000, attributes, ctypes.sizeof(attributes)))
    flags = MS_NOSUID | MS_NODEV
    _mount("tmpfs", ROOT + "/tmp", "tmpfs", flags, f"size={SCRATCH_MIB}m,nr_inodes=4096,mode=1777")
    os.chroot(ROOT)
    os.chdir("/tmp")


def _restrict(version: int) -> None:
    """By Landlock: no file is changed, created or removed; no TCP; no signals to others."""
    if version < 1:
        return
    changes = 0b1_1111_1111_0010 | (1 << 13 if version >= 2 else 0) | (1 << 14 if version >= 3 else 0)
    rules = (ctypes.c_uint64 * 3)(changes, 0b11 if version >= 4 else 0, 0b11 if version >= 6 else 0)
    size = 24 if version >= 6 else 16 if version >= 4 else 8
    ruleset = LIBC.syscall(LANDLOCK_CREATE, ctypes.byref(rules), ctypes.c_size_t(size), 0)
    _called(ruleset)
    _called(LIBC.syscall(LANDLOCK_RESTRICT, ruleset, 0))
    os.close(ruleset)


if __name__ == "__main__":
    try:
        print(isolation())
    except UserError as problem:
        sys.exit(str(problem))
