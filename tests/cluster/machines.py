"""Several machines on this one: network namespaces on a bridge, each with a Ray node in a PID namespace of its own.

What is killed here is the whole PID namespace, as when a machine loses its power; what is cut is a port of the bridge,
which drops packets in silence, as a pulled cable does. All machines see the same files, except where one is started
with folders of its own. Needs root; `refusal` says why it cannot be.
"""

import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.cluster.warm_workers import WarmWorkers

# Ray as a command, whose workers are started by the interpreter in the environment. Its server for remote drivers is
# left out: nobody needs it here, and on a busy machine it would end a head that comes up slowly.
RAY = """import os, sys
from ray._private import parameter
parameter.RayParams.ray_client_server_port = property(lambda self: None, lambda self, port: None)
from ray.scripts.scripts import main
sys.executable = os.environ["WORKERS_START_WITH"]
main()"""
START_LIMIT = 120  # seconds until a node has joined
PORT = 6399
# A head that gives up a silent node after about ten seconds, where the defaults take a minute.
QUICK_HEALTH = {
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "3000",
    "RAY_health_check_failure_threshold": "3",
}
BLOCKED, FORWARDING = "0", "3"  # states of a bridge's port


def refusal() -> str | None:
    """Why machines cannot be made here, if they cannot."""
    tools = ("ip", "bridge", "nsenter", "setpriv", "unshare", "mount")
    if missing := [tool for tool in tools if shutil.which(tool) is None]:
        return f"machines of network namespaces need {', '.join(missing)}"
    probe = "unshare --net --mount --pid --fork --mount-proc ip link add x type bridge"
    done = subprocess.run(probe.split(), capture_output=True, text=True, timeout=30)
    return f"namespaces are not allowed here: {done.stderr.strip()}" if done.returncode else None


class Machine:
    """One of them: its network, and the Ray node in it while it runs."""

    def __init__(self, machines: "Machines", number: int):
        self.machines, self.number = machines, number
        self.name = f"{machines.name}n{number}"
        self.port = f"{machines.name}p{number}"
        self.address = f"{machines.network}.{number + 1}"
        self.node: subprocess.Popen | None = None
        self.starts = 0
        run("ip", "netns", "add", self.name)
        run("ip", "link", "add", self.port, "type", "veth", "peer", "name", "eth0", "netns", self.name)
        run("ip", "link", "set", self.port, "master", machines.bridge, "up")
        run("ip", "-n", self.name, "addr", "add", f"{self.address}/24", "dev", "eth0")
        run("ip", "-n", self.name, "link", "set", "eth0", "up")
        run("ip", "-n", self.name, "link", "set", "lo", "up")
        # Ray finds its own address through the default route.
        run("ip", "-n", self.name, "route", "add", "default", "via", f"{machines.network}.254")

    @property
    def log(self) -> Path:
        return self.machines.folder / f"{self.name}.{self.starts}.log"

    def start(self, **settings: Any) -> None:
        self.launch(**settings)
        self.wait_until_joined()

    def launch(self, *, apart: Sequence[Path] = (), dashboard: bool = False, **resources: float) -> None:
        """Begin to start a Ray node. `apart`: folders that this machine has for itself."""
        assert self.node is None, f"{self.name} runs"
        self.starts += 1
        temporary = self.machines.folder / f"{self.number}.{self.starts}"
        words = [f"--node-ip-address={self.address}", f"--temp-dir={temporary}", "--object-store-memory=80000000"]
        words += ["--disable-usage-stats", f"--num-cpus={resources.pop('cpus', 1):g}"]
        words += [f"--num-gpus={resources.pop('gpus', 0):g}", f"--resources={json.dumps(resources)}"]
        if self.number == 0:
            words += ["--head", f"--port={PORT}", f"--include-dashboard={str(dashboard).lower()}"]
        else:
            words += [f"--address={self.machines.address}"]
        mounts = [f"mount --bind {self.machines.hosts} /etc/hosts"]
        mounts += [f"mount -t tmpfs apart {folder}" for folder in apart]
        # The shell is the namespace's first process, and therefore also the one that buries the others' dead.
        command = " && ".join([*mounts, '"$@" & wait $!'])
        # It ends with us, however we end.
        namespaces = f"setpriv --pdeathsig KILL nsenter --net=/run/netns/{self.name} "
        namespaces += "unshare --mount --pid --fork --mount-proc --kill-child"
        self.node = subprocess.Popen(
            [*namespaces.split(), "sh", "-c", command, "sh", sys.executable, "-c", RAY, "start", *words, "--block"],
            env=self.machines.environment,
            stdout=self.log.open("w"),
            stderr=subprocess.STDOUT,
        )

    def wait_until_joined(self) -> None:
        wait_until(self._has_joined, START_LIMIT, lambda: f"{self.name} does not start:\n{self.log.read_text()}")

    def _has_joined(self) -> bool:
        assert self.node is not None and self.node.poll() is None, f"{self.name} has ended:\n{self.log.read_text()}"
        return "Ray runtime started" in self.log.read_text()

    def kill(self) -> None:
        """Every process of it ends at once, without a word to anybody."""
        assert self.node is not None
        self.node.kill()  # and with it, the first process of the namespace
        self.node.wait(30)
        self.node = None

    def cut(self) -> None:
        run("bridge", "link", "set", "dev", self.port, "state", BLOCKED)

    def mend(self) -> None:
        run("bridge", "link", "set", "dev", self.port, "state", FORWARDING)

    def command(self, words: Sequence[str]) -> list[str]:
        """The words that run a command on this machine, beside its Ray node."""
        assert self.node is not None, f"{self.name} does not run"
        return ["nsenter", "--target", str(self._first_process()), "--net", "--mount", "--pid", *words]

    def popen(self, words: Sequence[str], log: Path, **environment: str) -> subprocess.Popen:
        with log.open("a") as opened:
            return subprocess.Popen(
                self.command(words),
                env=self.machines.environment | environment,
                stdout=opened,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
            )

    def _first_process(self) -> int:
        assert self.node is not None
        (child,) = Path(f"/proc/{self.node.pid}/task/{self.node.pid}/children").read_text().split()
        return int(child)

    def processes(self) -> dict[int, str]:
        """What runs on it, as seen from outside: process ids and command lines."""
        if self.node is None:
            return {}
        namespace = os.readlink(f"/proc/{self._first_process()}/ns/pid")
        found = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    if os.readlink(entry / "ns/pid") == namespace:
                        found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
                except OSError:  # it has just ended
                    continue
        return {pid: line for pid, line in found.items() if line}  # a dead one that nobody has buried has no line

    def workers(self) -> dict[int, str]:
        """The processes of runs: not those of Ray itself, and not its idle ones."""
        return {pid: line for pid, line in self.processes().items() if is_of_a_run(line)}

    def roles(self) -> list[int]:
        """The processes that hold a run's models."""
        return [pid for pid, line in self.workers().items() if line.startswith("ray::RayWorker")]


def is_of_a_run(line: str) -> bool:
    if line.startswith("ray::"):
        return not line.startswith(("ray::IDLE", "ray::DashboardAgent", "ray::RuntimeEnvAgent"))
    return "trimtab.cli" in line or "multiprocessing" in line


class Machines:
    """A head and others, all made with their networks; Ray nodes are started one by one."""

    # Never the same twice in a process: the kernel removes a deleted namespace's links some time later.
    marks = itertools.count(os.getpid())

    def __init__(self, size: int, **environment: str):
        mark = next(self.marks) % 1000
        self.name, self.network = f"tt{mark}", f"10.{100 + mark // 250}.{mark % 250}"
        self.bridge, self.address = f"{self.name}br", f"{self.network}.1:{PORT}"
        # Short, because the paths of sockets have a limit.
        self.folder = Path(tempfile.mkdtemp(prefix="tt"))
        token = self.folder / "token"
        token.write_text(os.urandom(32).hex())
        token.chmod(0o600)
        self.warm = WarmWorkers(self.folder)
        self.environment = os.environ | {
            "WORKERS_START_WITH": str(self.warm.interpreter),
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(token),
            "RAY_USAGE_STATS_ENABLED": "0",
            "PYTHONPATH": str(Path(__file__).parents[2]),
            "OMP_NUM_THREADS": "1",
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "1",  # the short tests forbid it
            **QUICK_HEALTH,
            **environment,
        }
        self.all: list[Machine] = []
        self.size = size
        try:
            run("ip", "link", "add", self.bridge, "type", "bridge")
            run("ip", "addr", "add", f"{self.network}.254/24", "dev", self.bridge)
            run("ip", "link", "set", self.bridge, "up")
            for number in range(size):
                self.all.append(Machine(self, number))
        except BaseException:
            self.close()
            raise
        # torch's store asks for the name of the mapped form of an address, and waits ten seconds if there is none.
        lines = [f"{form}{machine.address} {machine.name}" for machine in self.all for form in ("", "::ffff:")]
        self.hosts = self.folder / "hosts"
        self.hosts.write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))

    @property
    def head(self) -> Machine:
        return self.all[0]

    def start(self, *numbers: int, **settings: Any) -> None:
        """The head first, if it is among them, and then the others together."""
        if 0 in numbers:
            self.head.start(**settings)
        others = [self.all[number] for number in numbers if number]
        for machine in others:
            machine.launch(**settings)
        for machine in others:
            machine.wait_until_joined()

    def workers(self) -> dict[str, dict[int, str]]:
        return {machine.name: workers for machine in self.all if (workers := machine.workers())}

    def assert_no_orphan(self, seconds: float = 15) -> None:
        """Whatever belonged to a run has gone, soon."""
        wait_until(lambda: not self.workers(), seconds, lambda: f"left after {seconds:g} s: {self.workers()}")

    def close(self) -> None:
        for machine in reversed(self.all):
            if machine.node is not None:
                machine.kill()
        for number in range(self.size):  # also of a machine that was only half made
            subprocess.run(["ip", "netns", "del", f"{self.name}n{number}"], capture_output=True, timeout=30)
        subprocess.run(["ip", "link", "del", self.bridge], capture_output=True, timeout=30)
        self.warm.close()
        shutil.rmtree(self.folder, ignore_errors=True)


def wait_until(condition, seconds: float, told=lambda: "nothing happened", every: float = 0.1) -> float:
    """The seconds it took."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < seconds, told()
        time.sleep(every)
    return time.monotonic() - began


def run(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, f"{' '.join(words)}: {done.stderr.strip()}"
