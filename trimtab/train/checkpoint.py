"""Resumable checkpoints that are whole or absent.

    ckpt_path/
      latest                     the name of the newest whole checkpoint
      global_step40/             state.json and tensors.safetensors (weights, Adam's moments), in parts if need be
      global_step40_hf/          with --save_hf_ckpt: the model as a Hugging Face folder

A checkpoint is written beside its place, flushed to disk, renamed, and only then does `latest` move. Nothing here is
a pickle, so a checkpoint from a stranger runs no code.
"""

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from safetensors import SafetensorError

from trimtab.distributed.world import World
from trimtab.errors import UserError
from trimtab.files import UNFINISHED, flush, move, reason, remove, write_text, writing

PREFIX = "global_step"
STATE, LATEST, OLD = "state.json", "latest", ".old-"


class Checkpoints:
    def __init__(self, folder: Path, *, keep: int, keep_gib: float, world: World | None = None):
        self.folder = folder
        self.keep = max(1, keep)
        self.keep_bytes = keep_gib * 2**30
        self.world = world or World()
        self._saved: Path | None = None

    def saved(self, step: int) -> Path | None:
        """The checkpoint of this step, if it was written by this run."""
        return self._saved if self._saved and self._saved.name == f"{PREFIX}{step}" else None

    def save(
        self, step: int, write: Callable[[Path], None], state: dict, export: Callable[[Path], None] | None = None
    ) -> Path:
        """Write the checkpoint of `step`, all processes together: `write` its tensors, flushed to disk, `export` the
        Hugging Face folder beside it."""
        final = self.folder / f"{PREFIX}{step}"
        beside = self.folder / f"{UNFINISHED}{PREFIX}{step}"
        try:
            self._together(lambda: self._make_room(beside), leader_only=True)
            self._together(lambda: write(beside))
            self._together(lambda: self._publish(beside, final, state), leader_only=True)
            if export is not None:
                self._together(lambda: export(self.folder / f"{PREFIX}{step}_hf"))
            self._together(lambda: self._prune(final), leader_only=True)
        except (OSError, SafetensorError) as error:
            if self.world.leads:
                shutil.rmtree(beside, ignore_errors=True)
            previous = self.latest()
            kept = f"the previous one ({previous.name}) is intact" if previous else "there is no earlier one"
            raise UserError(
                f"--ckpt_path {self.folder}: cannot write the checkpoint of step {step} ({reason(error)}); {kept}; "
                "free some space and continue with --load_checkpoint"
            ) from error
        self._saved = final
        return final

    def export_only(self, step: int, export: Callable[[Path], None]) -> Path:
        """Only the Hugging Face folder of `step`; older ones beyond the number to keep go."""
        folder = self.folder / f"{PREFIX}{step}_hf"
        with writing(f"--ckpt_path {folder}: cannot write the model"):
            self._together(lambda: export(folder))
        kept = sorted(self.folder.glob(f"{PREFIX}*_hf"), key=lambda p: int(p.name[len(PREFIX) : -len("_hf")]))
        for old in kept[: -self.keep] if self.world.leads else []:
            shutil.rmtree(old, ignore_errors=True)
        return folder

    def _together(self, action: Callable[[], None], *, leader_only: bool = False) -> None:
        """Act, and fail on every process if one fails, so that none is left waiting for it."""
        error = None
        if self.world.leads or not leader_only:
            try:
                action()
            except (OSError, SafetensorError) as problem:
                error = problem
        failures = [failure for failure in self.world.gather(error and reason(error)) if failure]
        if failures:
            raise error or OSError(failures[0])

    def _make_room(self, beside: Path) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.clean()
        beside.mkdir()

    def _publish(self, beside: Path, final: Path, state: dict) -> None:
        (beside / STATE).write_text(json.dumps(state))
        flush(beside)
        if final.exists():  # an earlier run's checkpoint of the same step
            move(final, final.with_name(f"{OLD}{final.name}"))
        move(beside, final)
        write_text(self.folder / LATEST, final.name)
        self.clean()

    def latest(self) -> Path | None:
        """The newest whole checkpoint, whatever an interrupted write left behind."""
        self._bring_back()
        with suppress(OSError):
            name = (self.folder / LATEST).read_text(errors="replace").strip()
            if not is_name(name):
                raise UserError(
                    f"--ckpt_path {self.folder / LATEST}: names {name[:80]!r}, which is no checkpoint of this folder; "
                    f"write the name of one into it, such as {PREFIX}40, or remove the file"
                )
            if (self.folder / name / STATE).exists():
                return self.folder / name
        whole = [p for p in self._all() if (p / STATE).exists()]
        return whole[-1] if whole else None

    def load(self) -> tuple[Path, dict] | None:
        """The newest checkpoint and its state; its tensors are read from the folder."""
        path = self.latest()
        if path is None:
            return None
        with reading(path):
            return path, json.loads((path / STATE).read_text())

    def clean(self) -> None:
        """Remove what interrupted writes left. A replaced checkpoint counts as garbage once its successor is there."""
        self._bring_back()
        for pattern in (f"{UNFINISHED}*", f"{OLD}*"):
            for path in self.folder.glob(pattern):
                remove(path)

    def _bring_back(self) -> None:
        """A checkpoint set aside for a successor that never came."""
        if self.world.leads:
            for path in self.folder.glob(f"{OLD}*"):
                if not (place := path.with_name(path.name.removeprefix(OLD))).exists():
                    move(path, place)

    def _all(self) -> list[Path]:
        paths = [p for p in self.folder.glob(f"{PREFIX}*") if is_name(p.name)]
        return sorted(paths, key=lambda p: int(p.name[len(PREFIX) :]))

    def _prune(self, newest: Path) -> None:
        """Oldest first, until both limits hold; the newest stays whatever they say."""
        kept = [p for p in self._all() if p != newest] + [newest]
        sizes = {p: _size(p) for p in kept}
        while len(kept) > 1 and (len(kept) > self.keep or sum(sizes[p] for p in kept) > self.keep_bytes):
            oldest = kept.pop(0)
            shutil.rmtree(oldest, ignore_errors=True)
            shutil.rmtree(oldest.with_name(oldest.name + "_hf"), ignore_errors=True)


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """A damaged checkpoint inside becomes one line."""
    try:
        yield
    except (OSError, SafetensorError, ValueError) as error:
        raise UserError(
            f"--ckpt_path {path}: damaged checkpoint ({reason(error)}); remove this folder to use the one before"
        ) from error


def is_name(text: str) -> bool:
    """Whether a checkpoint may be called so: never a path, which could lead anywhere."""
    digits = text.removeprefix(PREFIX)
    return digits != text and digits.isdecimal()


def _size(folder: Path) -> int:
    both = (folder, folder.with_name(folder.name + "_hf"))
    return sum(p.stat().st_size for f in both for p in f.rglob("*") if p.is_file())
