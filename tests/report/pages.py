"""Runs as they lie on disk, and a reader that fails on a broken page."""

import json
import math
from html.parser import HTMLParser

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


def step_row(step: int, **changes) -> dict:
    row = {
        "step": step,
        "epoch": step / 40,
        "loss": 3.0 * math.exp(-step / 10) + 0.1,
        "learning_rate": 1e-3 / step,
        "grad_norm": 1.0 + 1 / step,
        "samples": 8,
        "tokens": 100,
        "trained_tokens": 40,
        "tokens_per_second": 1000.0,
        "seconds": 0.1,
        "memory_gib": 0.5,
        "skipped_steps": 0,
    }
    return row | changes


def write_metrics(folder, rows) -> None:
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


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
        grown = {name: value * step / steps for name, value in FIGURES[job].items()}
        evaluation = {f"eval_{name}": value for name, value in {"loss": 3 / step, **grown}.items()}
        rows.append(step_row(step) | grown | (evaluation if step % 10 == 0 else {}))
    write_metrics(folder, rows)
    chosen = {"pretrain": "some/model", "dataset": "data/rows.jsonl", "save_path": str(folder), **options}
    (folder / "options.yaml").write_text(f"# trimtab {job}\n" + "".join(f"{k}: {v}\n" for k, v in chosen.items()))
    counts = {"rows_read": 400, "rows_kept": 390, "rows_truncated": 3, "tokens": 9000, "lengths": {"min": 3, "max": 50}}
    if job in ("rm", "dpo"):
        counts |= {"rows_equal": 2, "prompts_shared": 390, "tokens_shared": 3000}
    manifest = {"job": job, "steps": steps, "device": "CPU, 1 threads", "dtype": "float32", "initial_weights": "abc"}
    manifest |= {"parameters": 1000, "trainable_parameters": 1000, "data": {**counts, "evaluation": counts}}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    if job == "rm":
        pairs = [[math.sin(index) + 1, math.cos(index) - 1] for index in range(300)]
        stored = {"mean": 0.0, "std": 1.0, "source": "evaluation", "chosen_rejected": pairs}
        (folder / "rewards.json").write_text(json.dumps(stored))
    (folder / "config.json").write_text("{}")
    return folder
