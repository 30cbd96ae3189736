"""Several processes on one device, over gloo: the gradients, losses and checkpoints of one process.

Everything is imported once; cases run in forks, four at a time, each with a limit of its own. A case prints one line:

    gradients   of the first step in fp32, from Adam's first moment in its checkpoint, against one process: at most 1e-5
                of the largest entry. RL jobs learn from a rollout that one process has recorded.
    losses      of ten steps, the largest difference from one process: at most 1e-4
    resume      killed after a checkpoint and resumed: the final model is that of the uninterrupted run, bit for bit

Besides them: a world of one process over the device's own library; one command with `--nproc 2`; runs that sample in
several processes, whose log-probs are the trainer's (at most 1e-4, in bf16 0.05, with --exact on 0); and an engine in
another process than the policy, whose weights reach it through the device's memory (CUDA IPC).

    python benchmarks/h200/processes.py [--only "sft zero 3"] [--all] [--at_once 4] [--seconds 120] [--limit 480]
"""

import argparse
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # asking whether a device is there leaves forks alone
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Without it gloo looks the machine's own name up for every group.
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import transformers.models.llama.modeling_llama
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import trimtab.train.rl
import trimtab.train.supervised_tasks  # noqa: F401
from benchmarks import plan_layouts
from trimtab.cli.main import main as command
from trimtab.distributed.device import find_device
from trimtab.distributed.weight_transfer import (
    GLOO,
    TransferSender,
    describe_receiver,
    join_as_receiver,
    plan_transfer,
    tensor_specs,
)
from trimtab.models.policy import Policy
from trimtab.models.selfcheck import choose_path
from trimtab.rollout.factory import build_engine
from trimtab.rollout.sampling import SamplingParams
from trimtab.train.checkpoint import Checkpoints, ShardedTensors

LAYOUTS = {
    "zero 2": (2, "--zero_stage 2"),
    "zero 3": (2, "--zero_stage 3"),
    "zero 3 in 4": (4, "--zero_stage 3"),
    "tensor 2": (2, "--ds_tensor_parallel_size 2"),
    "context 2": (2, "--ring_attn_size 2"),
    "tensor 2 x data 2": (4, "--ds_tensor_parallel_size 2 --zero_stage 3"),
    "zpg 2": (4, "--zero_stage 3 --zpg 2"),
}
JOBS = {
    "sft": "sft --dataset {0}/sft.jsonl --input_key input --output_key output --max_len 128",
    "dpo": "dpo --dataset {0}/dpo.jsonl --prompt_key prompt --max_len 128",
    "grpo": "grpo --prompt_data {0}/grpo.jsonl --input_key input --reward_verifier length(40) --init_kl_coef 0.01",
    "ppo": "ppo --prompt_data {0}/grpo.jsonl --input_key input --reward_verifier length(40) --init_kl_coef 0.01",
}
JOBS["lora"] = f"{JOBS['sft']} --lora_rank 8"
RL = " --prompt_max_len 16 --generate_max_len 48 --n_samples_per_prompt 4 --rollout_batch_size 4 --train_batch_size 16"
# The most telling first: every job, then every layout.
CASES = [
    *[("sft", "zero 3"), ("grpo", "zero 3"), ("ppo", "zero 2"), ("dpo", "context 2"), ("lora", "tensor 2")],
    *[("sft", "tensor 2 x data 2"), ("grpo", "tensor 2"), ("ppo", "zpg 2"), ("sft", "context 2"), ("sft", "zpg 2")],
    *[("grpo", "context 2"), ("dpo", "zero 3"), ("sft", "tensor 2"), ("sft", "zero 2"), ("lora", "zero 3 in 4")],
    *[("ppo", "tensor 2 x data 2"), ("grpo", "zero 3 in 4"), ("dpo", "tensor 2"), ("sft", "zero 3 in 4")],
]
WIDTHS = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8}
TOLERANCE, LOSSES = 1e-5, 1e-4
SAMPLING = {"grpo zero 3": 1e-4, "grpo tensor 2 x data 2": 1e-4, "ppo zero 3": 1e-4}
SAMPLING |= {"grpo zero 3 --bf16": 0.0, "grpo zero 3 --bf16 --exact off": 0.05}
SAMPLING |= {f"grpo {layout} --bf16 --exact on": 0.0 for layout in ("zero 2", "zero 3", "zero 3 in 4")}
SAMPLING |= {"grpo zero 3 --bf16 --exact on --lora_rank 8 --gradient_checkpointing": 0.0}


class Failed(Exception):
    """A run did not end as it should."""


def fork(work: Callable[[], object], log: Path, **environment: str) -> int:
    """The id of a child that does `work` with this log and environment, and ends."""
    sys.stdout.flush()
    if child := os.fork():
        return child
    code: object = 1
    try:
        os.environ.update(environment)
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        code = work()
    except SystemExit as error:
        code = error.code
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 0 if code is None else 1)


class Running:
    """A world of processes, each a fork."""

    def __init__(self, works: list[Callable[[], object]], log: Path, world: int = 1):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        each = {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1"}
        each |= {"MASTER_PORT": port}
        self.logs = [log.with_name(f"{log.name}.{rank}.log") for rank in range(len(works))]
        self.alive = {
            fork(work, path, **(each | {"RANK": str(rank), "LOCAL_RANK": str(rank)} if world > 1 else {})): rank
            for rank, (work, path) in enumerate(zip(works, self.logs))
        }

    def poll(self) -> None:
        """Take note of children that have ended. Failed: one of them with an error."""
        for child, rank in list(self.alive.items()):
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                del self.alive[child]
                if code := os.waitstatus_to_exitcode(status):
                    time.sleep(2)  # others may say more
                    self.kill()
                    raise Failed(f"process {rank} ended with {code}: {last_lines(self.logs[rank])}")

    def kill(self) -> None:
        for child in self.alive:
            os.kill(child, signal.SIGKILL)
        for child in self.alive:
            os.waitpid(child, 0)
        self.alive.clear()

    def wait(self) -> None:
        while self.alive:
            self.poll()
            time.sleep(0.02)


def last_lines(log: Path, count: int = 3) -> str:
    return " | ".join(line.strip() for line in log.read_text(errors="replace").strip().splitlines()[-count:])[-600:]


class Bench:
    def __init__(self, folder: Path, steps: int):
        self.folder, self.steps = folder, steps

    def words(self, job: str, out: Path, more: str) -> list[str]:
        is_rl = job in ("grpo", "ppo")
        text = JOBS[job].format(self.folder) + (RL if is_rl else " --train_batch_size 8")
        text += f" --pretrain {self.folder} --save_path {out} --ckpt_path {out}/ck --max_steps {self.steps}"
        text += " --micro_train_batch_size 2 --max_norm 0 --save_steps 1 --max_ckpt_num 99 --compile off"
        text += " --full_determinism"
        return [*text.split(), *("--num_episodes 9" if is_rl else "--max_epochs 9").split(), *more.split()]

    def start(self, job: str, out: Path, more: str, processes: int = 1) -> Running:
        words = self.words(job, out, more)
        return Running([lambda: command(words)] * processes, out, processes)

    # ---- cases: what they return is printed

    def alone(self, job: str) -> str:
        """The run of one process; of an RL job also its recording."""
        recording = f"--record {self.folder}/record-{job}" if job in ("grpo", "ppo") else ""
        self.start(job, self.folder / f"alone-{job}", recording).wait()
        return f"ok: {self.steps} steps in one process"

    def case(self, job: str, layout: str) -> str:
        alone, (processes, words) = self.folder / f"alone-{job}", LAYOUTS[layout]
        if count_rows(alone) < self.steps:
            raise Failed("the run in one process failed")
        words += " --dist_backend gloo"
        if layout != "zero 3":  # one layout of every job is also checked before its first step
            words += " --skip_checks all"
        if job in ("grpo", "ppo"):
            words += f" --replay {self.folder}/record-{job}"
        several = self.folder / f"{job}-{layout}".replace(" ", "-")
        self.start(job, several, words, processes).wait()
        worst = max(gradient_difference(alone, several, role) for role in roles(job))
        losses = max(abs(a - b) for a, b in zip(curve(alone, job), curve(several, job), strict=True))
        resumed = self.resumed(job, words, processes, several)
        shutil.rmtree(several)
        good = "ok" if worst <= TOLERANCE and losses <= LOSSES and resumed == "exact" else "WRONG"
        return f"{good}: gradients differ by {worst:.1e}, {self.steps} losses by {losses:.1e}, resume {resumed}"

    def resumed(self, job: str, words: str, processes: int, whole: Path) -> str:
        """How far a run killed in its middle and resumed is from the uninterrupted one."""
        out = whole.with_name(f"{whole.name}-again")
        running, checkpoints = self.start(job, out, words, processes), Checkpoints(out / "ck", keep=99, keep_gib=1000)
        while running.alive and (count_rows(out) < self.steps // 2 or checkpoints.latest() is None):
            running.poll()
            time.sleep(0.02)
        if not running.alive:
            raise Failed("it ended before it could be killed")
        running.kill()
        if checkpoints.latest() is None:
            raise Failed("no checkpoint before it was killed")
        self.start(job, out, f"{words} --load_checkpoint", processes).wait()
        name = "adapter_model.safetensors" if job == "lora" else "model.safetensors"
        first, second = load_file(whole / name), load_file(out / name)
        shutil.rmtree(out)
        if first.keys() != second.keys():
            return "with other tensors"
        if all(torch.equal(first[key], second[key]) for key in first):
            return "exact"
        return f"off by {max(float((first[key] - second[key]).abs().max()) for key in first):.1e}"

    def live(self, name: str) -> str:
        """A run that samples in several processes, and whose samples agree with the trainer's log-probs."""
        case, dashes, options = name.partition(" --")
        (job, layout), out = case.split(" ", 1), self.folder / f"live-{name.replace(' ', '-')}"
        processes, words = LAYOUTS[layout]
        more = f"{words} --dist_backend gloo --skip_checks all{dashes}{options}"
        running = self.start(job, out, more, processes)
        running.wait()
        gap = max(row["log_prob_gap"] for row in map(json.loads, (out / "metrics.jsonl").read_text().splitlines()))
        slow = [line for log in running.logs for line in log.read_text().splitlines() if "more slowly" in line]
        verdict = "ok" if gap <= SAMPLING[name] else "WRONG"
        return f"{verdict}: sampled and trained log-probs differ by {gap:.1e}" + (f"; {slow[0]}" if slow else "")

    def launcher(self) -> str:
        """A whole command, started as users do."""
        words = self.words("sft", self.folder / "launched", "--nproc 2 --zero_stage 3")
        done = subprocess.run([sys.executable, "-m", "trimtab.cli.main", *words], capture_output=True, text=True)
        if done.returncode:
            raise Failed(f"exit {done.returncode}: {' | '.join(done.stderr.strip().splitlines()[-3:])[-600:]}")
        backend = [line for line in done.stdout.splitlines() if "communicate through" in line]
        return f"ok: trimtab sft --nproc 2; {backend[0] if backend else 'the library of the device'}"

    def world_of_one(self) -> str:
        log = self.folder / "one"
        Running([world_of_one], log).wait()
        return f"ok: {log.with_name('one.0.log').read_text().strip().splitlines()[-1]}"

    def engine_apart(self) -> str:
        log = self.folder / "apart"
        Running([lambda: send_weights(self.folder), lambda: receive_weights(self.folder)], log).wait()
        said = [json.loads((self.folder / f"{name}.json").read_text()) for name in ("sent", "received")]
        same = said[0]["answers"] == said[1]["answers"] and said[0]["answers"][0] != said[0]["answers"][1]
        return f"{'ok' if same else 'WRONG'}: two versions of the weights sent ({said[0]['way']}), answers {same}"


def roles(job: str) -> list[str]:
    return {"grpo": ["actor"], "ppo": ["actor", "critic"]}.get(job, ["."])


def count_rows(out: Path) -> int:
    path = out / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


def curve(out: Path, job: str) -> list[float]:
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    name = "policy_loss" if job in ("grpo", "ppo") and "policy_loss" in rows[-1] else "loss"
    return [row[name] for row in rows if name in row]


def gradient_difference(first: Path, second: Path, role: str) -> float:
    """The largest difference of the first step's gradients, relative to the largest entry."""
    found = []
    for out in (first, second):
        path = min((path for path in (out / "ck").iterdir() if path.is_dir()), key=lambda path: path.stat().st_mtime)
        saved = ShardedTensors(path / role)
        found.append({name: saved.whole(name) for name in saved.names() if name.startswith("exp_avg/")})
    assert found[0] and found[0].keys() == found[1].keys()
    largest = max(float(value.abs().max()) for value in found[0].values())
    return max(float((value - found[1][name]).abs().max()) for name, value in found[0].items()) / largest


# ---- a world of one, and an engine apart


def world_of_one() -> None:
    import torch.distributed as dist

    from trimtab.distributed.process_group import init_process_group, leave_world

    device = find_device()
    init_process_group(device.torch, store=dist.HashStore(), rank=0, world_size=1)
    value = torch.ones(4, device=device.torch)
    dist.all_reduce(value)
    gathered = torch.empty(4, device=device.torch)
    dist.all_gather_into_tensor(gathered, value)
    assert value.sum() == gathered.sum() == 4
    print(dist.get_backend(), flush=True)
    leave_world()


def policy_of(folder: Path, scale: float) -> Policy:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(find_device().torch)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(scale)
    policy = Policy(model.eval())
    choose_path(policy)
    return policy


def answers(policy: Policy) -> list[list[int]]:
    engine = build_engine(policy, max_num_seqs=8, kv_tokens=1024)
    prompts = [[5 + i, 9, 40 + 3 * i, 7] for i in range(8)]
    found = engine.generate(prompts, SamplingParams(max_new_tokens=24), seeds=range(8))
    engine.close()
    return [rollout.ids for rollout in found]


def send_weights(folder: Path) -> None:
    device, policy = find_device().torch, policy_of(folder, 1.0)
    sender, named = TransferSender(device), list(policy.named_parameters())
    offer = sender.offer()
    tensors = [list(spec) for spec in tensor_specs(named)]
    seat = wait_for(folder / "seat.json")
    plan = plan_transfer([offer], [seat], backend=GLOO, tensors=tensors, about={}, patience=60)
    write(folder / "plan.json", plan)
    sender.open(json.loads(json.dumps(plan)))
    found = []
    for version in range(2):
        with torch.no_grad():
            for _, parameter in named:
                parameter.mul_(1 + version)
        sender.send(named)
        found.append(answers(policy))
    write(folder / "sent.json", {"answers": found, "way": plan[0]["way"]})
    sender.close()


def receive_weights(folder: Path) -> None:
    device, policy = find_device().torch, policy_of(folder, 0.5)
    write(folder / "seat.json", describe_receiver(device))
    channel, parameters = join_as_receiver(wait_for(folder / "plan.json"), device), dict(policy.named_parameters())
    found = []
    for _ in range(2):
        with channel.receiving() as coming, torch.no_grad():
            for name, tensor in coming:
                parameters[name].copy_(tensor)
        found.append(answers(policy))
    write(folder / "received.json", {"answers": found})
    channel.close()


def write(path: Path, value: object) -> None:
    part = path.with_suffix(".part")
    part.write_text(json.dumps(value))
    part.rename(path)


def wait_for(path: Path) -> list:
    while not path.exists():
        time.sleep(0.02)
    return json.loads(path.read_text())


# ---- many cases at once


def run_all(cases: dict[str, Callable[[], str]], folder: Path, at_once: int, seconds: float, until: float) -> None:
    """Run each case in a fork with a limit, and print its line when it ends."""
    waiting, running = list(cases), dict[int, tuple[str, float]]()
    while waiting or running:
        now = time.monotonic()
        while waiting and len(running) < at_once and now < until - 10:
            name = waiting.pop(0)
            running[fork(lambda: run_case(cases[name], folder / f"{name}.said"), folder / f"{name}.log")] = (name, now)  # noqa: B023
        if waiting and now >= until - 10:
            print(f"left out, no time: {', '.join(waiting)}", flush=True)
            waiting.clear()
        for child, (name, began) in list(running.items()):
            done, _ = os.waitpid(child, os.WNOHANG)
            late = now > min(began + seconds, until)
            if not done and not late:
                continue
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)  # also what it has started
            if not done:
                os.waitpid(child, 0)
            path = folder / f"{name}.said"
            said = path.read_text() if path.exists() else f"FAILED: stopped; {newest_log(folder, name)}"
            print(f"{name:<24} {said}; {now - began:.0f} s", flush=True)
            del running[child]
        time.sleep(0.05)


def newest_log(folder: Path, name: str) -> str:
    """The last lines of the logs of a case that was stopped."""
    logs = sorted(folder.glob(f"{name.replace(' ', '-')}*.log"), key=lambda path: path.stat().st_mtime)
    return f"{logs[-1].name}: {last_lines(logs[-1])}" if logs else "no log"


def run_case(case: Callable[[], str], said: Path) -> None:
    os.setsid()
    try:
        text = case()
    except Failed as error:
        text = f"FAILED: {error}"
    except Exception as error:
        traceback.print_exc()
        text = f"FAILED: {type(error).__name__}: {str(error)[:300]}"
    said.write_text(text)


def make_inputs(folder: Path) -> None:
    plan_layouts.make_folder(folder, plan_layouts.SHAPE | WIDTHS | {"vocab_size": 1024})
    plan_layouts.write_data(folder)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="", help="cases whose name begins so")
    parser.add_argument("--all", action="store_true", help="every job in every layout")
    parser.add_argument("--at_once", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=120, help="limit of a case")
    parser.add_argument("--limit", type=float, default=480, help="seconds of everything")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--keep", type=Path, help="a file for the logs of all processes")
    arguments = parser.parse_args(argv)
    until = time.monotonic() + arguments.limit
    warnings.filterwarnings("ignore", message=".*multi-threaded, use of fork")  # nothing is at work in its threads
    assert not torch.cuda.is_initialized(), "a device was touched before the forks"
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as place:
        folder = Path(place)
        bench = Bench(folder, arguments.steps)
        Running([lambda: make_inputs(folder)], folder / "inputs").wait()
        try:
            Running([lambda: print(torch.ones(8, device=find_device().torch).sum())], folder / "fork").wait()
        except Failed as error:
            sys.exit(f"forks cannot use the device: {error}")
        chosen = [(job, layout) for job in JOBS for layout in LAYOUTS] if arguments.all else CASES
        cases = {f"{job} {layout}": lambda j=job, k=layout: bench.case(j, k) for job, layout in chosen}
        others = {
            "a world of one": bench.world_of_one,
            "an engine apart": bench.engine_apart,
            "the launcher": bench.launcher,
            **{f"sampling {name}": lambda name=name: bench.live(name) for name in SAMPLING},
        }
        cases = {name: case for name, case in (others | cases).items() if name.startswith(arguments.only)}
        jobs = {job for job, layout in chosen if f"{job} {layout}" in cases}
        alone = {f"alone {job}": lambda j=job: bench.alone(j) for job in JOBS if job in jobs}
        limits = (arguments.at_once, arguments.seconds, until)
        try:
            run_all(alone, folder, *limits)
            run_all(cases, folder, *limits)
        finally:
            if arguments.keep is not None:
                with arguments.keep.open("w") as file:
                    for log in sorted(folder.glob("*.log")):
                        file.write(f"==== {log.name}\n{log.read_text(errors='replace')[-20_000:]}\n")


if __name__ == "__main__":
    main()
