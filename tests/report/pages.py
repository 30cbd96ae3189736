"""Runs as they lie on disk, and a reader that fails on a broken page."""

import json
import math
import random
import re
from html.parser import HTMLParser
from pathlib import Path

from trimtab.report.page import write_report

VOID = {"meta", "br", "hr", "img", "input", "link", "line", "path", "rect"}


class Checked(HTMLParser):
    """Fails on tags that do not close and remembers what the page contains."""

    def __init__(self, page: str):
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.attributes: list[tuple[str, str | None]] = []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.tags.add(tag)
        self.attributes += attributes
        if tag not in VOID or tag == "rect":
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.add(tag)
        self.attributes += attributes

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def checked(page: str) -> str:
    """The page, which is whole, fetches nothing, runs nothing and has numbers for coordinates; with plain spaces."""
    assert not Checked(page).tags & {"script", "link", "iframe", "object", "img"}
    assert not re.search(r'="[^"]*\b(nan|inf)\b', page), "a coordinate is not a number"
    return page.replace("\u00a0", " ")


def page_of(folder: Path) -> str:
    path = write_report(folder)
    assert path == folder / "report.html"
    return checked(path.read_text())


def read_lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def write_lines(path: Path, rows) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def change_manifest(folder: Path, **changes) -> None:
    path = folder / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def scribble(source: Path, target: Path, dice: random.Random) -> None:
    """Copy what a run's page is made of, cut or written over at random places."""
    for name in ("metrics.jsonl", "options.yaml", "manifest.json", "rewards.json", "rollouts.jsonl"):
        if (source / name).exists():
            content = bytearray((source / name).read_bytes())
            for _ in range(dice.randint(0, 6)):
                place, written = (
                    dice.randrange(len(content)),
                    [b"", b"\x00", b"1e999", b'"', b"[", b"-", b"NaN", b"9" * 30],
                )
                content[place : place + dice.randint(0, 9)] = dice.choice(written)
            (target / name).write_bytes(content[: dice.choice([len(content), dice.randrange(len(content))])])


def step_row(step: int, **changes) -> dict:
    row = {"step": step, "epoch": step / 40, "loss": 3.0 * math.exp(-step / 10) + 0.1, "learning_rate": 1e-3 / step}
    row |= {"grad_norm": 1.0 + 1 / step, "samples": 8, "tokens": 100, "trained_tokens": 40, "seconds": 0.1}
    row |= {"tokens_per_second": 1000.0, "memory_gib": 0.5, "skipped_steps": 0}
    return row | changes


def write_metrics(folder, rows) -> None:
    write_lines(folder / "metrics.jsonl", rows)


def rl_row(step: int, steps: int, evaluated: bool, critic: bool) -> dict:
    """An iteration of RL on the way from one success in four to nearly all."""
    done = step / steps
    seconds = {"rollout": 2.0 - done, "scoring": 0.2, "update": 1.0} | ({"evaluation": 1.5} if evaluated else {})
    row = {"step": step, "epoch": done, "reward": 0.25 + 0.7 * done, "reward_std": 0.4 - 0.2 * done}
    row |= {"score": 0.25 + 0.7 * done, "return": 0.0, "equal_groups": 0.1 + 0.5 * done}
    row |= {"length": 6.0 - done, "length_max": 8, "truncated": 0.02, "kl": 0.02 * done, "kl_answer": 0.1 * done}
    row |= {"kl_coefficient": 0.001, "sampled_entropy": 1.2 - 0.8 * done, "policy_loss": 0.01 * (-1) ** step}
    row |= {"clip_fraction": 0.01 * done, "policy_kl": 1e-4, "log_prob_gap": 1e-6, "log_prob_ratio": 1.0}
    row |= {"kl_loss": 0.02 * done, "loss": 0.011 * (-1) ** step, "learning_rate": 1e-4, "grad_norm": 0.5}
    row |= {"reward/right": 0.2 + 0.7 * done, "reward_histogram": [0.0, 1.0, 64 - step, 0, 0, step]}
    row |= {"length_histogram": [5.0, 8.0, 60, 2, 2], "prompt_scores": [[step % 5, done], [7, 0.0], [8, 1.0]]}
    row |= {"reward/format": 0.05, "skipped_steps": 0, "alarms": [], "samples": 64, "tokens": 384}
    row |= {"prompt_tokens": 80, "seconds": sum(seconds.values())}
    row |= {f"seconds_{phase}": spent for phase, spent in seconds.items()}
    row |= {"tokens_per_second": 384 / row["seconds"], "rollout_tokens_per_second": 384 / seconds["rollout"]}
    row |= {"update_tokens_per_second": 384.0, "memory_gib": 0.5}
    if critic:
        row |= {"explained_variance": done - 0.1, "critic_loss": 0.3 - 0.2 * done, "critic_clip_fraction": 0.02}
        row |= {"critic_grad_norm": 0.7, "critic_learning_rate": 1e-3}
    return row | (rl_evaluation(done) if evaluated else {})


def rl_evaluation(done: float) -> dict:
    figures = {"eval_reward": 0.3 + 0.65 * done, "eval_length": 6.0, "eval_binary": True}
    for source, harder in (("", 0.0), ("short_", -0.1), ("long_", 0.1)):
        figures |= {f"eval_{source}pass_1": 0.27 + 0.67 * done - harder * done}
        figures |= {f"eval_{source}pass_4": 0.55 + 0.43 * done - 0.1 * abs(harder)}
    return figures | {"eval_pass_1_low": 0.2 + 0.7 * done, "eval_pass_1_high": 0.34 + 0.62 * done}


def write_rl_run(folder, job: str = "grpo", steps: int = 40, **options):
    """A healthy RL run: evaluated before training and at every tenth iteration."""
    write_run(folder, job, steps=0, prompt_data="data/prompts.jsonl", eval_dataset="data/test.jsonl", **options)
    rows = [{"step": 0, **rl_evaluation(0.0)}]
    rows += [rl_row(step, steps, step % 10 == 0, job == "ppo") for step in range(1, steps + 1)]
    write_metrics(folder, rows)
    rollouts = [
        {"step": step, "row": kind, "prompt": f"sort 21{step}>", "response": f"12{step}{kind}"}
        | {"reward": 1.0 - kind / 4, "tokens": 5, "finish": "stop" if kind < 3 else "length"}
        | {"kept": "best" if kind < 2 else "worst", "group": "train" if kind == 1 else None}
        for step in range(1, steps + 1)
        for kind in range(4)
    ]
    write_lines(folder / "rollouts.jsonl", rollouts)
    counts = json.loads((folder / "manifest.json").read_text())["data"]["evaluation"]
    data = {"train": counts, "evaluation": counts}
    change_manifest(folder, steps=steps, reward="the file reward.py", data=data)
    return folder


def write_async_run(folder, steps: int = 40, engines: int = 2, **options):
    """The same of a run whose engines write while its trainer learns: an iteration takes four seconds, of which the
    trainer waits for one and learns for two and a half."""
    write_rl_run(folder, steps=steps, async_train=True, async_queue_size=1, async_staleness=4, **options)
    rows = read_lines(folder / "metrics.jsonl")
    for row in rows[1:]:
        odd = (-1) ** row["step"]
        row |= {"age": 1.1 + 0.2 * odd, "age_max": 1 + row["step"] % 4, "waiting": 0.25 + 0.05 * odd}
        row |= {"under_way": 30 + odd, "read_again": 20 + odd, "corrected_share": 0.03 + 0.01 * odd}
        row |= {"engine_busy": 0.9 + 0.02 * odd}
    write_metrics(folder, rows)
    line = []
    for step in range(1, steps + 1):
        start = 4.0 * (step - 1)
        phases = {"rollout": (0, 1), "scoring": (1, 1.25), "update": (1.25, 3.75), "sync": (3.75, 4)}
        lanes = [("trainer", what, *times) for what, times in phases.items()]
        lanes += [(f"engine {engine}", "writing", 0, 3.0 - 0.25 * engine) for engine in range(engines)]
        lanes += [("rewards 0", "judging", 0.5, 0.75), ("rewards 0", "judging", 2.0, 2.5)]
        line += [(lane, what, start + begin, start + end, step) for lane, what, begin, end in lanes]
    names = ("lane", "what", "begin", "end", "iteration")
    write_lines(folder / "time_line.jsonl", [dict(zip(names, row)) for row in line])
    return folder


def write_episode_run(folder, steps: int = 40, **options):
    """The same of a run whose answers are episodes of an environment with a tool."""
    write_rl_run(folder, steps=steps, environment="trimtab:guess", max_turns=4, generate_max_len=7, **options)
    rows = read_lines(folder / "metrics.jsonl")
    for row in rows[1:]:
        done = row["step"] / steps
        row |= {"turns": 3 - done, "episode_length": 20 - 5 * done, "failed_episodes": 0.0, "branches": 1.0}
        row |= {"tool_calls": 1.0, "tool_failures": 0.3 - 0.2 * done, "unknown_tools": 0.0}
        row |= {"finish/stop": 0.8 + 0.2 * done, "finish/turns": 0.2 - 0.2 * done}
        row |= {"seconds_environment": 0.01, "seconds_environment_95": 0.05}
    write_metrics(folder, rows)
    rollouts = read_lines(folder / "rollouts.jsonl")
    for row in rollouts:
        won = row["reward"] > 0.5
        row |= {"prompt": "Find my number from 1 to 7 in 3 guesses.", "turns": episode_turns(won)}
        row |= {
            "environment": {"tool_calls": 1, "guesses": 2, "tool_failures": 0, "begun": 1, "turns": 3},
            "finish": "stop" if won else "turns",
        }
    write_lines(folder / "rollouts.jsonl", rollouts)
    return folder


def episode_turns(won: bool) -> list[dict]:
    call = '<tool_call>{"name": "middle", "arguments": {"low": 1, "high": 7}}</tool_call>'
    said = [("assistant", call, 0.0), ("tool", "4", 0.0), ("assistant", "4", 0.0), ("user", "higher", 0.0)]
    said.append(("assistant", "6" if won else "<b>seven</b>", 1.0 if won else 0.0))
    return [
        {"role": role, "text": text, "tokens": 2, "drawn": role == "assistant", "reward": reward, "seconds": 0.2}
        for role, text, reward in said
    ]


FIGURES = {
    "sft": {},
    "rm": {"accuracy": 0.8, "chosen_reward": 1.0, "rejected_reward": -1.0},
    "prm": {"accuracy": 0.8},
    "dpo": {"accuracy": 0.8, "chosen_reward": 0.5, "rejected_reward": -1.0, "reward_margin": 1.5, "nll": 2.0},
    "kto": {"kl": 0.3, "chosen_reward": 0.5, "rejected_reward": -1.0},
    "kd": {"nll": 2.0, "distance": 1.0},
}


def write_run(folder, job: str = "sft", steps: int = 40, **options):
    """A healthy run of a job, with everything such a run leaves but its weights."""
    folder.mkdir(parents=True)
    rows = []
    for step in range(1, steps + 1):
        grown = {name: value * step / steps for name, value in FIGURES.get(job, {}).items()}
        evaluation = {f"eval_{name}": value for name, value in {"loss": 3 / step, **grown}.items()}
        rows.append(step_row(step) | grown | (evaluation if step % 10 == 0 else {}))
    write_metrics(folder, rows)
    chosen = {"pretrain": "some/model", "save_path": str(folder), **options}
    chosen |= {} if "prompt_data" in options else {"dataset": "data/rows.jsonl"}
    (folder / "options.yaml").write_text(f"# trimtab {job}\n" + "".join(f"{k}: {v}\n" for k, v in chosen.items()))
    counts = {"rows_read": 400, "rows_kept": 390, "rows_truncated": 3, "tokens": 9000, "lengths": {"min": 3, "max": 50}}
    if job in ("rm", "dpo"):
        counts |= {"rows_equal": 2, "prompts_shared": 390, "tokens_shared": 3000}
    manifest = {"job": job, "steps": steps, "device": "CPU, 1 threads", "dtype": "float32", "initial_weights": "abc"}
    manifest |= {"data_order": "order", "seed": 1, "trainable": "names", "settings": {}}
    manifest |= {"parameters": 1000, "trainable_parameters": 1000, "data": {**counts, "evaluation": counts}}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    if job == "rm":
        pairs = [[math.sin(index) + 1, math.cos(index) - 1] for index in range(300)]
        stored = {"mean": 0.0, "std": 1.0, "source": "evaluation", "chosen_rejected": pairs}
        (folder / "rewards.json").write_text(json.dumps(stored))
    (folder / "config.json").write_text("{}")
    return folder
