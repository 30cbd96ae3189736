"""How much room a run still needs on disk, and a warning while there is time to make some."""

import os
import shutil
import time
from pathlib import Path

from trimtab.config.groups import CheckpointOptions

BESIDE = 16 * 2**20  # tokenizer, descriptions, metrics
EVERY = 30.0  # seconds between two looks


class SpaceWatch:
    def __init__(self, options: CheckpointOptions, *, model: int, checkpoint: int):
        """Bytes of the model that is written at the end, and of a checkpoint; both are written beside what is there."""
        self._needs = [("save_path", Path(options.save_path), "the model at the end", model + BESIDE)]
        if options.save_steps > 0 and not options.disable_ds_ckpt:
            self._needs.append(("ckpt_path", Path(options.checkpoint_folder), "the next checkpoint", checkpoint))
        self._last = -EVERY
        self._told = False

    def warning(self) -> str | None:
        """A line when room begins to be short; looks now and then only."""
        if time.monotonic() - self._last < EVERY:
            return None
        self._last = time.monotonic()
        short = self._shortage()
        new, self._told = short is not None and not self._told, short is not None
        return short if new else None

    def _shortage(self) -> str | None:
        disks: dict[int, list[tuple[str, Path, str, int]]] = {}
        for need in self._needs:
            disks.setdefault(os.stat(_nearest(need[1])).st_dev, []).append(need)
        for needs in disks.values():
            free, wanted = shutil.disk_usage(_nearest(needs[0][1])).free, sum(need[3] for need in needs)
            if free < wanted:
                what = " and ".join(need[2] for need in needs)
                return (
                    f"warning: --{needs[0][0]} {needs[0][1]}: {_size(free)} are free on this disk, and {what} "
                    f"{'needs' if len(needs) == 1 else 'need'} {_size(wanted)}: make room before then"
                )
        return None


def adam_bytes(parameters: int, *, averaged: int = 0) -> int:
    """Of a checkpoint: weights and two moments in fp32, and an average of some of the weights."""
    return 12 * parameters + 4 * averaged


def _nearest(folder: Path) -> Path:
    return next(path for path in (folder, *folder.resolve().parents) if path.exists())


def _size(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"
