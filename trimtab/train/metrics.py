"""metrics.jsonl: one row an optimiser step, always. TensorBoard and wandb read the same rows."""

import json
import math
import os
from pathlib import Path

from trimtab.config.groups import LoggingOptions

CLOCK_FIELDS = ("seconds", "tokens_per_second", "memory_gib")  # what two equal runs may differ in


class MetricsFile:
    def __init__(self, path: Path, *, resume_from: int | None):
        """`resume_from`: the step of the checkpoint a run goes on from; rows after it are removed."""
        path.parent.mkdir(parents=True, exist_ok=True)
        if resume_from is None:
            _set_aside(path)
        else:
            _keep_until(path, resume_from)
        self._file = path.open("a")

    def write(self, row: dict) -> None:
        # A number that is not finite has no spelling in JSON.
        row = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def read_rows(path: Path) -> list[dict]:
    """The whole rows of a metrics file; a last line cut short by a crash is left out."""
    rows = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            rows.append(json.loads(line))
        except ValueError:
            continue
    return rows


def _keep_until(path: Path, step: int) -> None:
    kept = [row for row in read_rows(path) if row.get("step", 0) <= step]
    beside = path.with_name(f".{path.name}-{os.getpid()}")
    beside.write_text("".join(json.dumps(row) + "\n" for row in kept))
    os.replace(beside, path)


def _set_aside(path: Path) -> None:
    """A new run in an old run's folder: the old curve is kept under a number."""
    if not path.exists() or path.stat().st_size == 0:
        return
    number = 1
    while (aside := path.with_name(f"{path.stem}.{number}{path.suffix}")).exists():
        number += 1
    path.rename(aside)


class TensorBoardLog:
    def __init__(self, folder: Path):
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder))

    def write(self, row: dict) -> None:
        for name, value in row.items():
            if name != "step" and isinstance(value, (int, float)) and math.isfinite(value):
                self._writer.add_scalar(f"train/{name}", value, row["step"])

    def close(self) -> None:
        self._writer.close()


class WandbLog:
    def __init__(self, options: LoggingOptions, config: dict):
        import wandb

        named_mode = options.use_wandb if options.use_wandb in ("offline", "online") else None
        token = options.use_wandb if options.use_wandb not in ("True", "offline", "online") else None
        if token and not os.environ.get("WANDB_API_KEY"):
            os.environ["WANDB_API_KEY"] = token
        self._run = wandb.init(
            entity=options.wandb_org,
            project=options.wandb_project,
            group=options.wandb_group,
            name=options.wandb_run_name,
            config=config,
            mode=named_mode or os.environ.get("WANDB_MODE"),
        )

    def write(self, row: dict) -> None:
        self._run.log({f"train/{k}": v for k, v in row.items() if k != "step"}, step=row["step"])

    def close(self) -> None:
        self._run.finish()


def open_logs(options: LoggingOptions, config: dict) -> list:
    logs = []
    if options.use_wandb:
        logs.append(WandbLog(options, config))
    if options.use_tensorboard:
        logs.append(TensorBoardLog(Path(options.use_tensorboard) / (options.wandb_run_name or "run")))
    return logs
