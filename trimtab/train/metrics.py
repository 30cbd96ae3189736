"""A run's log: metrics.jsonl (one row an optimizer step, always), other loggers, alarms, the progress bar.

TensorBoard, VisualDL, wandb and trackio read the same rows.
"""

import contextlib
import contextvars
import io
import json
import logging
import math
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx

from trimtab.config.resolved_config import to_dict
from trimtab.config.training_options import LoggingOptions
from trimtab.data.hub import PROBE_SECONDS, answered
from trimtab.errors import UserError
from trimtab.files import move, replacing, writing
from trimtab.progress import RunProgress
from trimtab.train.alarms import MetricAlarms
from trimtab.train.run_directory import SpaceWatch

# Columns in which two equal runs may differ.
PHASES = ("rollout", "scoring", "update", "sync", "evaluation")
CLOCK_FIELDS = ("seconds", "tokens_per_second", "memory_gib", *(f"seconds_{phase}" for phase in PHASES))
CLOCK_FIELDS += ("rollout_tokens_per_second", "update_tokens_per_second", "seconds_compile")
CLOCK_FIELDS += ("seconds_environment", "seconds_environment_95", "reward/judge/seconds")


class MetricsFile:
    """A JSON-lines file with one row a step, flushed after every row."""

    def __init__(self, path: Path, *, resume_from: int | None, key: str = "step"):
        """`resume_from`: the step of the checkpoint to resume from, after which rows are removed; `key`: the column
        with the step."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._key, self.last = key, -1  # step of the last row
        if resume_from is None:
            _set_aside(path)
        else:
            self.last = _keep_until(path, resume_from, key)
        self._file = path.open("a")

    def write(self, row: dict) -> dict:
        """Append a row and return it as written."""
        # JSON has no NaN and no infinity.
        row = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()
        self.last = row[self._key]
        return row

    def close(self) -> None:
        # Rows are flushed one by one, so a failure here repeats one that `write` has raised, and must not hide it.
        with contextlib.suppress(OSError):
            self._file.close()


def read_rows(path: Path, key: str = "step") -> list[dict]:
    """The rows of a metrics file; a last line cut short by a crash is left out."""
    return [row for _, row in _lines(path, key)]


def _lines(path: Path, key: str) -> Iterator[tuple[bytes, dict]]:
    """Lines without their end, and the rows in them, one at a time: a file may be larger than memory."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            row = _row(line, key)
            if row is not None:
                yield line.rstrip(b"\n"), row
            elif line.endswith(b"\n"):
                raise UserError(
                    f"{path}: line {number} is no row of metrics ({line[:40].decode(errors='replace').strip()!r}); "
                    "remove that line, or give another --save_path"
                )


def _row(line: bytes, key: str) -> dict | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) and type(row.get(key)) is int else None


def _keep_until(path: Path, step: int, key: str) -> int:
    """Remove the rows after a step; returns the step of the last remaining row, or -1."""
    last = -1
    with replacing(path) as beside, beside.open("wb") as file:
        for line, row in _lines(path, key):
            if row[key] <= step:
                file.write(line + b"\n")
                last = max(last, row[key])
    return last


def _set_aside(path: Path) -> None:
    """Rename the metrics of an earlier run in the same folder to the next free number."""
    if not path.exists() or path.stat().st_size == 0:
        return
    number = 1
    while (aside := path.with_name(f"{path.stem}.{number}{path.suffix}")).exists():
        number += 1
    move(path, aside)


class TensorBoardLog:
    def __init__(self, folder: Path):
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder))

    def write(self, row: dict) -> None:
        for curve, value in _curves(row).items():
            self._writer.add_scalar(curve, value, row["step"])  # VisualDL's writer has the same signature
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class VisualDLLog(TensorBoardLog):
    def __init__(self, folder: Path, earlier: Sequence[dict]):
        from visualdl import LogWriter

        self._writer = LogWriter(logdir=str(folder))
        # VisualDL shows only the newest record of a folder, so it must contain the whole run.
        for row in earlier:
            self.write(row)


class WandbLog:
    def __init__(self, options: LoggingOptions, config: dict, folder: Path):
        """`folder`: for wandb's files; without a network they wait there for a later `wandb sync`."""
        import wandb

        key = options.use_wandb if options.use_wandb not in ("True", "offline", "online") else None
        # Only metrics: no copy of the console or the code. Timeouts keep a dead network from blocking start and end.
        settings = wandb.Settings(
            silent=True, console="off", disable_code=True, init_timeout=30, login_timeout=30, finish_timeout=120
        )
        if options.wandb_http_proxy:
            settings.http_proxy = settings.https_proxy = options.wandb_http_proxy
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)  # wandb's reports about itself
        ambient = wandb.setup(wandb.Settings(silent=True)).settings  # from the environment and wandb's settings files
        mode: Any = ambient.mode
        server = ambient.base_url
        if options.use_wandb in ("offline", "online"):
            mode = options.use_wandb
        if mode == "online":
            if not answered(lambda: httpx.head(server, timeout=PROBE_SECONDS, proxy=options.wandb_http_proxy)):
                mode = "offline"
                print(f"wandb: {server} cannot be reached; send the metrics later with: wandb sync {folder}/wandb/*")
            elif key:
                settings.api_key = key
        folder.mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            entity=options.wandb_org,
            project=options.wandb_project,
            group=options.wandb_group,
            name=options.wandb_run_name,
            config={**to_dict(options), **config},
            mode=mode,
            dir=str(folder),
            settings=settings,
        )
        if mode == "online":
            print(f"wandb: {self._run.url}")

    def write(self, row: dict) -> None:
        self._run.log(_curves(row), step=row["step"])

    def close(self) -> None:
        self._run.finish()


class TrackioLog:
    def __init__(self, options: LoggingOptions, config: dict, earlier: Sequence[dict]):
        """Log to trackio's folder on this machine, or to a trackio server."""
        import trackio

        self._trackio, server = trackio, options.use_trackio if options.use_trackio != "True" else None
        settings = {name: value for name, value in to_dict(options).items() if name != "use_trackio"}
        with _quietly():
            self._run = trackio.init(
                project=options.trackio_project,
                name=options.wandb_run_name,
                config={**settings, **config},
                server_url=server,
                # Nothing but metrics and answers.
                **dict.fromkeys(("embed", "auto_log_gpu", "auto_log_cpu"), False),
            )
        if server is None:
            print(f"trackio: look at the run with: trackio show --project {options.trackio_project}")
        self._answers: dict[str, list] = {}
        # trackio starts a new run on resume, so the earlier rows are logged again.
        for row in earlier:
            self.write(row)

    def write(self, row: dict) -> None:
        self._run.log({**_curves(row), **self._answers}, step=row["step"])
        self._answers = {}

    def show(self, answers: Sequence[dict]) -> None:
        """Queue the best and worst answers of an iteration, as conversations with rewards, for the next row."""
        for kind in ("best", "worst"):
            if chosen := [answer for answer in answers if answer.get("kept") == kind]:
                traces = [self._trackio.Trace(messages=_messages(row), metadata=_facts(row)) for row in chosen]
                self._answers[f"{kind} answers"] = traces

    def close(self) -> None:
        with _quietly():
            self._trackio.finish()  # not self._run.finish(), which trackio would call again at exit


def _quietly() -> contextlib.redirect_stdout:
    """Suppress a library's banners on standard output."""
    return contextlib.redirect_stdout(io.StringIO())


def _messages(answer: dict) -> list[dict[str, str]]:
    asked = [{"role": "user", "content": answer["prompt"]}]
    if turns := answer.get("turns"):
        return asked + [{"role": turn["role"], "content": turn["text"]} for turn in turns]
    return [*asked, {"role": "assistant", "content": answer["response"]}]


def _facts(answer: dict) -> dict[str, Any]:
    names = ("step", "row", "label", "reward", "parts", "advantage", "tokens", "finish", "environment")
    return {name: answer[name] for name in names if answer.get(name) is not None}


AnyLog = TensorBoardLog | WandbLog | TrackioLog


class GuardedLogger:
    """An optional logger that must not stop training: after its first failure it warns once and is switched off."""

    def __init__(self, name: str, make: Callable[[], AnyLog]):
        self._name = name
        self._log: AnyLog | None = None
        self._attempt(lambda: setattr(self, "_log", make()))

    def write(self, row: dict) -> None:
        if (log := self._log) is not None:
            self._attempt(lambda: log.write(row))

    def show(self, answers: Sequence[dict]) -> None:
        """Log answers of the step whose row comes next, if the logger supports them."""
        if isinstance(log := self._log, TrackioLog):
            self._attempt(lambda: log.show(answers))

    def close(self) -> None:
        if self._log is not None:
            self._attempt(self._log.close)

    def _attempt(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:
            self._log = None
            reason = " ".join(str(error).split())[:200] or type(error).__name__
            print(f"warning: {self._name} is left out from here on: {reason}", flush=True)


def _curves(row: dict) -> dict[str, float]:
    """The finite numbers of a row, under the train/ and eval/ prefixes by which dashboards group charts."""
    return {
        f"eval/{name.removeprefix('eval_')}" if name.startswith("eval_") else f"train/{name}": value
        for name, value in row.items()
        if name != "step" and isinstance(value, (int, float)) and math.isfinite(value)
    }


def open_logs(options: LoggingOptions, config: dict, folder: Path, earlier: Sequence[dict] = ()) -> list[GuardedLogger]:
    """The loggers that the options ask for; `earlier`: the rows of a resumed run up to its checkpoint."""
    logs = []
    if options.use_wandb:
        logs.append(GuardedLogger("wandb", lambda: WandbLog(options, config, folder)))
    name = options.wandb_run_name or "run"
    if board := options.use_tensorboard:
        logs.append(GuardedLogger("TensorBoard", lambda: TensorBoardLog(Path(board) / name)))
    if visual := options.use_visualdl:
        logs.append(GuardedLogger("VisualDL", lambda: VisualDLLog(Path(visual) / name, earlier)))
    if options.use_trackio:
        logs.append(GuardedLogger("trackio", lambda: TrackioLog(options, config, earlier)))
    return logs


# ---- a Python callback for every row


Listener = Callable[[dict[str, Any]], object]

_listener: contextvars.ContextVar[Listener | None] = contextvars.ContextVar("listener", default=None)


@contextlib.contextmanager
def row_listener(listener: Listener | None) -> Iterator[None]:
    """Call `listener` with every row that runs in this context write."""
    before = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(before)


def notify_listener(row: dict[str, Any]) -> None:
    """Pass a row to the listener, if there is one. Its exceptions propagate to the caller."""
    if (listener := _listener.get()) is not None:
        listener(dict(row))


# ---- the log of a run


FIGURE = re.compile(r"-?\d[\d.,]*(e[-+]?\d+)?")


class RunLog:
    """Writes a run's rows to metrics.jsonl and all loggers, raises alarms and moves the progress bar."""

    def __init__(
        self,
        options: LoggingOptions,
        manifest: dict,
        folder: Path,
        *,
        verb: str,
        total: int,
        start: int,
        resumed: bool,
        space: SpaceWatch,
        shown: Callable[[dict], dict[str, str]] | None = None,
    ):
        """`start`: the last step already done, -1 if an evaluation before the first step is to be logged; `resumed`:
        earlier rows are kept; `shown`: the figures of a row for the progress bar."""
        self.total, self.every = total, max(1, options.logging_steps)
        self._shown = shown or supervised_figures
        self._alarms, self._shown_alarms = MetricAlarms(), set[str]()
        self._cannot_write = f"--save_path {folder}: cannot write there"
        with writing(self._cannot_write):
            self._metrics = MetricsFile(folder / "metrics.jsonl", resume_from=start if resumed else None)
            earlier = read_rows(folder / "metrics.jsonl")
        for row in earlier:
            self._alarms.see(row)
        self._logs = open_logs(options, manifest, folder, list(filter(self._is_logged_step, earlier)))
        self._progress = RunProgress(verb, total, max(0, start), every=self.every)
        self._space = space
        self._warn_about_space()

    def write(self, row: dict) -> None:
        if alarms := [*row.get("alarms", []), *self._alarms.see(row)]:
            row["alarms"] = alarms
        with writing(self._cannot_write):
            written = self._metrics.write(row)
        if self._is_logged_step(row):
            for log in self._logs:
                log.write(row)
        self._progress.advance(row["step"], self._shown(row))
        for alarm in alarms:
            if (kind := _kind(alarm)) not in self._shown_alarms:  # shown once, not in every step
                self._shown_alarms.add(kind)
                self._progress.say(f"step {row['step']}: {alarm}")
        self._warn_about_space()
        notify_listener(written)

    def show(self, answers: list[dict]) -> None:
        """Log answers of the step whose row comes next, in loggers that support them."""
        for log in self._logs:
            log.show(answers)

    def _is_logged_step(self, row: dict) -> bool:
        return row["step"] % self.every == 0 or row["step"] == self.total

    def _warn_about_space(self) -> None:
        if warning := self._space.warning():
            self._progress.say(warning)

    def close(self) -> None:
        self._progress.close()
        self._metrics.close()
        for log in self._logs:
            log.close()


def _kind(alarm: str) -> str:
    """An alarm's text with its numbers replaced: alarms that differ only in numbers are the same alarm."""
    return FIGURE.sub("0", alarm)


def supervised_figures(row: dict) -> dict[str, str]:
    shown = {"loss": f"{row['loss']:.4f}"}
    if "eval_loss" in row:
        shown["eval"] = f"{row['eval_loss']:.4f}"
    shown |= {"tok/s": f"{row['tokens_per_second']:,.0f}", "mem": f"{row['memory_gib']:.1f} GiB"}
    if row["skipped_steps"] or not math.isfinite(row["grad_norm"]):
        shown["skipped"] = str(row["skipped_steps"])
    return shown
