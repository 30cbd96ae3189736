"""Resumable checkpoints that are whole or absent.

    ckpt_path/
      latest                     the name of the newest whole checkpoint
      global_step40/             state.json and tensors.safetensors (weights, Adam's moments), in parts if need be
      global_step40_hf/          with --save_hf_ckpt: the model as a Hugging Face folder

A checkpoint is written to a temporary folder, flushed to disk and renamed; only then is `latest` updated. Nothing here
is a pickle, so loading a checkpoint from an untrusted source runs no code. state.json holds the checksums of all files
(checkpoint_files.py); a damaged checkpoint is reported and the one before it is loaded.
"""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from safetensors import SafetensorError

from trimtab.config.training_options import CheckpointOptions, LoadOptions
from trimtab.distributed.device import Device
from trimtab.distributed.process_group import World
from trimtab.errors import CannotWrite, UserError
from trimtab.files import UNFINISHED, flush, move, new_temporary_folder, reason, remove, write_text, writing
from trimtab.models.folder import merging
from trimtab.models.load import load_frozen_policy
from trimtab.models.policy import Policy
from trimtab.train.alarms import LATEST, Mark, newest_checkpoint_mark
from trimtab.train.checkpoint_files import (
    PARTS,
    PATTERN,
    ShardedTensors,
    collect_checksums,
    find_damage,
    seal_state,
    unseal_state,
)

PREFIX = "global_step"
STATE, OLD = "state.json", ".old-"
FAILURES = (OSError, SafetensorError, ValueError)  # when writing; ValueError: a part of a sharded tensor is missing


class Checkpoints:
    """The checkpoints in one folder: save, prune, verify and load. All processes call its methods together."""

    def __init__(
        self, folder: Path, *, keep: int, keep_gib: float, world: World | None = None, run: Path | None = None
    ):
        """`run`: the run directory; if the disk of `folder` is full, a checkpoint may be saved next to it."""
        self.folder, self.run = folder, run
        self.keep = max(1, keep)
        self.keep_bytes = keep_gib * 2**30
        self.world = world or World()
        self._saved: Path | None = None

    def saved(self, step: int) -> Path | None:
        """The checkpoint of this step if this run wrote it."""
        return self._saved if self._saved and self._saved.name == f"{PREFIX}{step}" else None

    def save(
        self, step: int, write: Callable[[Path], None], state: dict, export: Callable[[Path], None] | None = None
    ) -> Path:
        """Write the checkpoint of `step`, all processes together. CannotWrite: it failed, and callers try `rescue`.

        `write` stores the tensors and flushes them to disk; `export` writes the Hugging Face folder next to them.
        """
        try:
            self._write(step, write, state, export)
        except FAILURES as error:
            previous = self.latest()
            kept = f"the previous one ({previous.name}) is intact" if previous else "there is no earlier one"
            raise CannotWrite(
                f"--ckpt_path {self.folder}: cannot write the checkpoint of step {step} ({reason(error)}); {kept}"
            ) from error
        self._saved = self.folder / f"{PREFIX}{step}"
        return self._saved

    def rescue(self, step: int, write: Callable[[Path], None], state: dict) -> str:
        """Save the checkpoint of `step` on the first disk with enough space, and return where it is and how to
        resume."""
        if self.saved(step):
            return f"step {step} is in {self.saved(step)}: make room and add --load_checkpoint to go on"
        for folder in self._rescue_folders():
            place = Checkpoints(folder, keep=self.keep, keep_gib=self.keep_bytes / 2**30, world=self.world)
            with suppress(*FAILURES):
                place._write(step, write, state, None)
                return (
                    f"step {step} is kept in {folder}: make room and go on with --load_checkpoint --ckpt_path {folder}"
                )
        return f"there is no room for a checkpoint of step {step} anywhere: make some and go on with --load_checkpoint"

    def _rescue_folders(self) -> Iterator[Path]:
        """Folders to try in order when the checkpoint folder cannot be written; each is created only when it is
        tried."""
        yield self.folder
        if self.run is None:
            return
        run, temporary = self.run.resolve(), None
        yield run.with_name(f"{run.name}-rescued")
        if self.world.is_rank_zero:
            with suppress(OSError):
                temporary = new_temporary_folder(f"trimtab-{run.name}")
        if (place := self.world.gather(temporary)[0]) is not None:
            yield place

    def _write(
        self, step: int, write: Callable[[Path], None], state: dict, export: Callable[[Path], None] | None
    ) -> None:
        final, unfinished = (self.folder / f"{start}{PREFIX}{step}" for start in ("", UNFINISHED))
        exported = self.folder / f"{UNFINISHED}{PREFIX}{step}_hf"
        try:
            self._collectively(lambda: self._create_folder(unfinished), leader_only=True)
            self._collectively(lambda: write(unfinished))
            if export is not None:
                self._collectively(lambda: export(exported))
            self._collectively(lambda: self._publish(unfinished, final, step, state, exported), leader_only=True)
            self._collectively(lambda: self._prune(final), leader_only=True)
        finally:
            if self.world.is_rank_zero:
                remove(unfinished)
                remove(exported)

    def export_only(self, step: int, export: Callable[[Path], None]) -> Path:
        """Write only the Hugging Face folder of `step`, and remove older ones beyond `keep`."""
        folder = self.folder / f"{PREFIX}{step}_hf"
        with writing(f"--ckpt_path {folder}: cannot write the model"):
            self._collectively(lambda: export(folder))
        kept = sorted(self.folder.glob(f"{PREFIX}*_hf"), key=lambda p: int(p.name[len(PREFIX) : -len("_hf")]))
        for old in kept[: -self.keep] if self.world.is_rank_zero else []:
            shutil.rmtree(old, ignore_errors=True)
        return folder

    def _collectively(self, action: Callable[[], None], *, leader_only: bool = False) -> None:
        """Run `action`, and raise in every process if it fails in one: a process that went on alone would wait
        forever."""
        error = None
        if self.world.is_rank_zero or not leader_only:
            try:
                action()
            except FAILURES as problem:
                error = problem
        failures = [failure for failure in self.world.gather(error and reason(error)) if failure]
        if failures:
            raise error or OSError(failures[0])

    def _create_folder(self, unfinished: Path) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.clean()
        unfinished.mkdir()

    def _publish(self, unfinished: Path, final: Path, step: int, state: dict, exported: Path) -> None:
        parts = collect_checksums(unfinished)
        for folder in {(unfinished / name).parent for name in parts}:
            ShardedTensors(folder)  # raises if a process wrote its part to a different disk
        (unfinished / STATE).write_text(seal_state(state, step, parts))
        flush(unfinished)
        if exported.exists():  # before the checkpoint: a resumed run does not export this step again
            remove(place := final.with_name(f"{final.name}_hf"))
            move(exported, place)
        if final.exists():  # an earlier run's checkpoint of the same step
            move(final, final.with_name(f"{OLD}{final.name}"))
        move(unfinished, final)
        write_text(self.folder / LATEST, final.name)
        self.clean()

    def latest(self) -> Path | None:
        """The newest checkpoint with a state file; its checksums are not verified."""
        return next((path for path in self._newest_first() if (path / STATE).exists()), None)

    def has_sign(self) -> bool:
        """Whether there is or was a checkpoint, damaged or not. If so, `load` returns one or raises."""
        return bool(self._checkpoints()) or (self.folder / LATEST).exists()

    def load(self) -> tuple[Path, dict] | None:
        """The newest checkpoint whose checksums match, and its state; callers read the tensors from the folder.

        Damaged ones are reported and skipped. None: there is no checkpoint and no sign that there was one.
        """
        damaged: list[tuple[Path, str]] = []
        for path in self._candidates():
            state, problem = self._examine(path)
            if problem is None:
                for broken, why in damaged:
                    self.world.say(f"warning: {broken}: damaged checkpoint ({why}); {path.name} is used instead")
                return path, state
            damaged.append((path, problem))
        if damaged:
            raise UserError(
                f"--ckpt_path {damaged[0][0]}: damaged checkpoint ({damaged[0][1]}), and there is no whole one before "
                "it; bring back a copy, or start from the beginning without --load_checkpoint"
            )
        return None

    def manifest(self) -> dict | None:
        """The manifest of the newest checkpoint, not yet verified; None where `load` would find none or raise."""
        with suppress(OSError, ValueError, UserError):
            if (path := self.latest()) is not None:
                return unseal_state((path / STATE).read_text(), _step(path))["manifest"]
        return None

    def _candidates(self) -> list[Path]:
        """Checkpoints to try, newest first, as rank 0 lists them: it may be renaming one back while others would
        look."""
        found: list[Path] = []
        problem = None
        if self.world.is_rank_zero:
            try:
                found = self._newest_first()
            except UserError as error:
                problem = str(error)
        found, problem = self.world.gather((found, problem))[0]
        if problem is not None:
            raise UserError(problem)
        return found

    def _examine(self, path: Path) -> tuple[dict, str | None]:
        """A checkpoint's state and its first problem, if any. Each process verifies a share of the files."""
        state, problem = {}, None
        try:
            state = unseal_state((path / STATE).read_text(), _step(path))
            parts = sorted(state.get(PARTS, {}).items())
            problem = find_damage(path, parts[self.world.rank :: self.world.size])
            if problem is None and self.world.is_rank_zero:
                for folder in sorted({(path / name).parent for name, _ in parts}):
                    if (found := ShardedTensors(folder).step) != state["step"]:
                        problem = f"its tensors are of step {found}"
        except (OSError, SafetensorError, LookupError, TypeError, ValueError, AttributeError) as error:
            problem = f"{path.name}/{STATE} is missing" if isinstance(error, FileNotFoundError) else reason(error)
        return state, next((found for found in self.world.gather(problem) if found), None)

    def _newest_first(self) -> list[Path]:
        """The checkpoint that `latest` names and the older ones; all checkpoints without a `latest` file."""
        self._restore_replaced()
        every = self._checkpoints()[::-1]
        if (name := self._latest_name()) is None:
            return every
        before = [path for path in every if _step(path) < _step(self.folder / name)]
        found = [path for path in every if path.name == name] + before
        if not found:
            raise UserError(
                f"--ckpt_path {self.folder}: the checkpoint that {LATEST} names ({name}) is gone, and there is none "
                f"before it; bring it back, or remove {LATEST} to start from the beginning"
            )
        return found

    def _latest_name(self) -> str | None:
        """The checkpoint that `latest` names; None without that file."""
        try:
            name = (self.folder / LATEST).read_text(errors="replace").strip()
        except OSError:
            return None
        if not is_name(name):
            raise UserError(
                f"--ckpt_path {self.folder / LATEST}: names {name[:80]!r}, which is no checkpoint of this folder; "
                f"write the name of one into it, such as {PREFIX}40, or remove the file"
            )
        return name

    def clean(self) -> None:
        """Remove leftovers of interrupted writes, and replaced checkpoints whose successor exists."""
        self._restore_replaced()
        for pattern in (f"{UNFINISHED}*", f"{OLD}*"):
            for path in self.folder.glob(pattern):
                remove(path)

    def _restore_replaced(self) -> None:
        """Rename a replaced checkpoint back if its successor was never finished."""
        if self.world.is_rank_zero:
            for path in self.folder.glob(f"{OLD}*"):
                if not (place := path.with_name(path.name.removeprefix(OLD))).exists():
                    move(path, place)

    def _checkpoints(self) -> list[Path]:
        paths = [p for p in self.folder.glob(f"{PREFIX}*") if is_name(p.name)]
        return sorted(paths, key=_step)

    def _prune(self, newest: Path) -> None:
        """Remove the oldest checkpoints until both limits hold; the newest always stays."""
        kept = [p for p in self._checkpoints() if p != newest] + [newest]
        sizes = {p: _size(p) for p in kept}
        while len(kept) > 1 and (len(kept) > self.keep or sum(sizes[p] for p in kept) > self.keep_bytes):
            oldest = kept.pop(0)
            shutil.rmtree(oldest, ignore_errors=True)
            shutil.rmtree(oldest.with_name(oldest.name + "_hf"), ignore_errors=True)


def newest_of_run(options: CheckpointOptions, before: Mark | None) -> Path | None:
    """The newest checkpoint that belongs to this run: the mark has changed since `before`, or the run resumed from
    it."""
    if newest_checkpoint_mark(options) == before and not options.load_checkpoint:
        return None
    return Checkpoints(Path(options.checkpoint_folder), keep=1, keep_gib=0).latest()


@contextmanager
def reading_checkpoint(path: Path) -> Iterator[None]:
    """Turn errors from reading a damaged checkpoint into a one-line UserError."""
    try:
        yield
    except (OSError, SafetensorError, LookupError, TypeError, ValueError) as error:
        raise UserError(
            f"--ckpt_path {path}: damaged checkpoint ({reason(error)}); remove this folder to use the one before"
        ) from error


def is_name(text: str) -> bool:
    """Whether `text` is a checkpoint's name. `latest` is untrusted: a path in it could point anywhere."""
    digits = text.removeprefix(PREFIX)
    return digits != text and digits.isdecimal()


def _step(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix(PREFIX))


def _size(folder: Path) -> int:
    both = (folder, folder.with_name(folder.name + "_hf"))
    return sum(p.stat().st_size for f in both for p in f.rglob("*") if p.is_file())


# ---- the policy of a checkpoint


WEIGHT = "weight/"  # prefix of a parameter's name in the optimizer's state


def restored_policy(pretrain: str, checkpoint: str | None, options: LoadOptions, device: Device) -> Policy:
    """A frozen policy with the weights of `checkpoint`, or those of `pretrain` without one.

    `pretrain` gives the architecture; `checkpoint` may be a model folder or the checkpoint folder of a run.
    """
    folder = Path(checkpoint).expanduser() if checkpoint else None
    if folder is not None and (folder / "config.json").exists():
        return load_frozen_policy(str(folder), options, device, "--ckpt_path").model
    policy = load_frozen_policy(pretrain, options, device, "--pretrain").model
    if folder is not None:
        tensors = _tensors_of(folder)
        print(f"weights of {tensors}", flush=True)
        _load_weights(policy, tensors)
    return policy


def _tensors_of(folder: Path) -> Path:
    """The folder with the policy's tensors in the newest checkpoint."""
    if (folder / "adapter_config.json").exists():
        raise UserError(
            f"--ckpt_path {folder}: an adapter, not a model; merge it first: {merging(folder, '--ckpt_path')}"
        )
    loaded = Checkpoints(folder, keep=1, keep_gib=0).load()
    if loaded is None:
        raise UserError(f"--ckpt_path {folder}: neither a model nor a checkpoint of training is in this folder")
    newest, _ = loaded
    # RL stores each trained model in its own folder.
    return next((place for place in (newest / "actor", newest) if any(place.glob(PATTERN))), newest)


def _load_weights(policy: Policy, folder: Path) -> None:
    with reading_checkpoint(folder):
        parts = ShardedTensors(folder)
        parameters = dict(policy.model.named_parameters())
        stored = {name.removeprefix(WEIGHT) for name in parts.names() if name.startswith(WEIGHT)}
        if stored != parameters.keys():
            odd = sorted(stored ^ parameters.keys())[0]
            raise UserError(
                f"--ckpt_path {folder}: its weights are not those of --pretrain (such as {odd}); name the model that "
                "training started from, or give the merged model of a LoRA run"
            )
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(parts.whole(f"{WEIGHT}{name}"))
