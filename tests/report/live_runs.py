"""Runs with answers and their tokens, and a page of them that is served in this process."""

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx

from tests.report.pages import write_rl_run
from trimtab.report.live_page import make_app
from trimtab.server.http import address, bind, make_server

EVERY = 0.05
EVIL = "</pre><script>alert(1)</script><img src=x onerror=alert(2)>\"'"


def write_answers(folder: Path, steps: Sequence[int] = (1, 2), answers: int = 4, **changes) -> Path:
    """A group of answers in every one of these iterations, with their tokens."""
    for step in steps:
        for number in range(answers):
            add_answer(folder, step, number, **changes)
    return folder


def add_answer(folder: Path, step: int, number: int, **changes) -> None:
    row = {"step": step, "answer": number, "row": 6, "prompt": "sort 312>", "response": f"123 {step}.{number}"}
    row |= {"label": "123", "reward": number / 4, "tokens": 2, "finish": "stop", "group": "train", "kept": None}
    tokens = {"step": step, "answer": number, "texts": ["123", f" {step}.{number}"], "drawn": [2]}
    tokens |= {"log_probs": [-0.01, -3.0], "advantages": [[number - 1.5, 2]]}
    for name, value in (("rollouts", row | changes), ("tokens", tokens)):
        with (folder / f"{name}.jsonl").open("a") as file:
            file.write(json.dumps(value) + "\n")


def rl_run(folder: Path, **changes) -> Path:
    """In this folder, or if it is there already, inside it."""
    folder = folder / "grpo" if folder.exists() else folder
    write_rl_run(folder, steps=4)
    (folder / "rollouts.jsonl").unlink()
    return write_answers(folder, **changes)


def add_row(folder: Path, step: int) -> None:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(json.loads(lines[-1]) | {"step": step}) + "\n")


@contextmanager
def served(*folders: Path) -> Iterator[httpx.Client]:
    server, listening = make_server(make_app(folders, EVERY), 1.0), bind("127.0.0.1", 0)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    try:
        with httpx.Client(base_url=address(listening), timeout=60, trust_env=False) as client:
            yield client
    finally:
        server.drain()
        thread.join(10)
        assert not thread.is_alive(), "it ends while clients listen"


def events(lines: Iterator[str]) -> Iterator[tuple[str, dict[str, str]]]:
    """The id and the sections of each event that changes some."""
    found: dict[str, str] = {}
    for line in lines:
        if line:
            name, _, value = line.partition(": ")
            found[name] = value
        else:
            if found.get("event") == "sections":
                yield found["id"], json.loads(found["data"])
            found = {}
