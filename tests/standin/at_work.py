"""Commands in processes whose accelerator is the stand-in, and what it was asked to do."""

import json
import os
from pathlib import Path

import torch

from tests import standin, warm


def run(folder: Path, *commands: list[str], size: int = 1) -> list[dict]:
    """Run commands one after the other, in `size` processes; what each process has to say of its device."""
    log = folder / "standin"
    codes = warm.call_world(_work, size, log, commands)
    said = [Path(f"{log}.{rank}.log").read_text() for rank in range(size)]
    assert codes == [0] * size, said
    return [json.loads(Path(f"{log}.{rank}.json").read_text()) for rank in range(size)]


def listen(path: str | Path) -> None:
    """What this process prints from here on is written to a file."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)


def _work(log: Path, commands: tuple[list[str], ...]) -> None:
    rank = os.environ["RANK"]
    listen(f"{log}.{rank}.log")
    standin.install()
    from trimtab.cli.main import main

    for command in commands:
        if (code := main(command)) != 0:
            raise SystemExit(code)
    told = {"kernels": standin.kernels(), "collectives": torch.ops.standin.collectives()}
    Path(f"{log}.{rank}.json").write_text(json.dumps(told))
