"""How both sides are timed: our commands in this process, a peer's trainer by a callback, first steps apart.

Every script prints a line as soon as it knows something, and its rows at the end as `ROW {json}` for docs/speed.md.
"""

import argparse
import contextlib
import gc
import io
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import torch
from limits import Rates
from shapes import SHAPES, TINY, Shape, write_model
from transformers import TrainerCallback
from transformers.utils import logging

median = statistics.median


def timed(work: Callable[[], object], device: torch.device):
    synchronize(device)
    began = time.perf_counter()
    result = work()
    synchronize(device)
    return result, time.perf_counter() - began


def synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


class Bench:
    """A script's arguments, device and folder."""

    def __init__(
        self,
        description: str | None,
        argv: list[str] | None,
        *,
        options: Callable[[argparse.ArgumentParser], object] = lambda _: None,
    ):
        from trimtab.distributed.device import find_device

        parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
        parser.add_argument("--tiny", action="store_true", help="a rehearsal of a few seconds, on a CPU too")
        parser.add_argument("--peer", default="yes", choices=("yes", "no", "only"), help="whether the peer is timed")
        parser.add_argument("--ours", action="append", help="more options of our command; given twice: two runs")
        parser.add_argument("--folder", type=Path, help="where models are written, and found by the next script")
        options(parser)
        self.arguments, found = parser.parse_args(argv), find_device()
        self.tiny, self.device, self.began = self.arguments.tiny, found.torch, time.monotonic()
        assert self.tiny or found.is_accelerator, "this benchmark needs an accelerator; --tiny does not"
        # These runs are too short for layers to be compiled by themselves.
        self.variants: list[str] = self.arguments.ours or ["" if self.tiny else "--compile on"]
        self.with_us, self.with_peer = self.arguments.peer != "only", self.arguments.peer != "no"
        self.folder = self.arguments.folder or Path(tempfile.mkdtemp(dir=self.in_memory))
        logging.set_verbosity_error()
        logging.disable_progress_bar()
        with contextlib.suppress(ImportError):
            from datasets import disable_progress_bars

            disable_progress_bars()
        self.rates = Rates.measured(self.device, self.tiny)

    @property
    def in_memory(self) -> str | None:
        """A place for large files that are read once."""
        return "/dev/shm" if Path("/dev/shm").is_dir() and not self.tiny else None

    def model(self, name: str, *, reward: bool = False) -> Path:
        """The folder of a model, which is written if it is not there."""
        path = self.folder / f"{'reward' if reward else 'model'}-{name}"
        if not (path / "config.json").exists():
            path.mkdir(parents=True, exist_ok=True)
            write_model(path, self.shape(name), self.device, reward=reward)
            self.release()
        return path

    def shape(self, name: str) -> Shape:
        return TINY if self.tiny else SHAPES[name]

    def say(self, words: str) -> None:
        print(f"[{time.monotonic() - self.began:4.0f} s] {words}", flush=True)

    def row(self, work: str, **figures: object) -> None:
        rounded = {k: float(f"{v:.4g}") if isinstance(v, float) else v for k, v in figures.items()}
        print("ROW", json.dumps({"work": work, **rounded}), flush=True)

    @contextlib.contextmanager
    def attempt(self, name: str) -> Iterator[None]:
        """One failure does not lose the rest."""
        try:
            yield
        except Exception as error:
            if self.tiny:
                raise
            self.say(f"{name} failed: {type(error).__name__}: {str(error)[:300]}")
        finally:
            self.release()

    def release(self) -> None:
        gc.collect()
        if self.device.type != "cpu":
            torch.accelerator.memory.empty_cache()

    def command(self, main: Callable[[list[str]], int], words: str, variant: str) -> list[dict]:
        """Run one of our commands in this process; its rows of metrics."""
        from trimtab.train.metrics import read_rows

        out = Path(tempfile.mkdtemp(dir=self.folder))
        precision = "" if self.tiny else " --bf16"
        written = io.StringIO()
        try:
            with contextlib.redirect_stdout(written):
                code = main(f"{words}{precision} --save_path {out} --ckpt_path {out}/ck {variant}".split())
            assert code == 0, written.getvalue()[-1500:]
            for line in written.getvalue().splitlines():
                if "compil" in line or "recomput" in line:  # what was decided before the first step
                    self.say(line.strip())
        finally:
            self.release()
        return read_rows(out / "metrics.jsonl")


class StepClock(TrainerCallback):
    """When a peer's first step began, and when its optimiser steps ended."""

    def __init__(self, device: torch.device):
        self.device, self.times = device, []

    def on_train_begin(self, *_, **__):
        synchronize(self.device)
        self.times.append(time.monotonic())

    def on_step_end(self, *_, **__):
        synchronize(self.device)
        self.times.append(time.monotonic())

    @property
    def seconds(self) -> float:
        """A step, in the median; the first counts only where there is no other."""
        each = [after - before for before, after in pairwise(self.times)]
        return median(each[1:] or each)
