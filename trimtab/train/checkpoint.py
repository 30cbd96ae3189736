"""Resumable checkpoints that are whole or absent.

    ckpt_path/
      latest                     the name of the newest whole checkpoint
      global_step40/             state.json and tensors.safetensors (weights, Adam's moments), in parts if need be
      global_step40_hf/          with --save_hf_ckpt: the model as a Hugging Face folder

A checkpoint is written beside its place, flushed to disk, renamed, and only then does `latest` move. Nothing here is
a pickle, so a checkpoint from a stranger runs no code. Its state has the checksums of all its files (integrity.py);
one that is not what was written is named and passed over for the one before.
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
FAILURES = (OSError, SafetensorError, ValueError)  # of writing: ValueError where not all parts are there


class Checkpoints:
    def __init__(
        self, folder: Path, *, keep: int, keep_gib: float, world: World | None = None, run: Path | None = None
    ):
        """`run`: the run's own folder, beside which a checkpoint may be kept if there is no room in `folder`."""
        self.folder, self.run = folder, run
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
        Hugging Face folder beside it. Where that fails, it is kept where there is room, and the run ends."""
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
        """Keep the checkpoint of `step` wherever there is room, and say where that is and how to go on."""
        if self.saved(step):
            return f"step {step} is in {self.saved(step)}: make room and add --load_checkpoint to go on"
        for folder in self._refuges():
            place = Checkpoints(folder, keep=self.keep, keep_gib=self.keep_bytes / 2**30, world=self.world)
            with suppress(*FAILURES):
                place._write(step, write, state, None)
                return (
                    f"step {step} is kept in {folder}: make room and go on with --load_checkpoint --ckpt_path {folder}"
                )
        return f"there is no room for a checkpoint of step {step} anywhere: make some and go on with --load_checkpoint"

    def _refuges(self) -> Iterator[Path]:
        """Where a checkpoint may be kept; each is made only when the ones before had no room."""
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
        final, beside = (self.folder / f"{start}{PREFIX}{step}" for start in ("", UNFINISHED))
        exported = self.folder / f"{UNFINISHED}{PREFIX}{step}_hf"
        try:
            self._together(lambda: self._make_room(beside), leader_only=True)
            self._together(lambda: write(beside))
            if export is not None:
                self._together(lambda: export(exported))
            self._together(lambda: self._publish(beside, final, step, state, exported), leader_only=True)
            self._together(lambda: self._prune(final), leader_only=True)
        finally:
            if self.world.is_rank_zero:
                remove(beside)
                remove(exported)

    def export_only(self, step: int, export: Callable[[Path], None]) -> Path:
        """Only the Hugging Face folder of `step`; older ones beyond the number to keep go."""
        folder = self.folder / f"{PREFIX}{step}_hf"
        with writing(f"--ckpt_path {folder}: cannot write the model"):
            self._together(lambda: export(folder))
        kept = sorted(self.folder.glob(f"{PREFIX}*_hf"), key=lambda p: int(p.name[len(PREFIX) : -len("_hf")]))
        for old in kept[: -self.keep] if self.world.is_rank_zero else []:
            shutil.rmtree(old, ignore_errors=True)
        return folder

    def _together(self, action: Callable[[], None], *, leader_only: bool = False) -> None:
        """Act, and fail on every process if one fails, so that none is left waiting for it."""
        error = None
        if self.world.is_rank_zero or not leader_only:
            try:
                action()
            except FAILURES as problem:
                error = problem
        failures = [failure for failure in self.world.gather(error and reason(error)) if failure]
        if failures:
            raise error or OSError(failures[0])

    def _make_room(self, beside: Path) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.clean()
        beside.mkdir()

    def _publish(self, beside: Path, final: Path, step: int, state: dict, exported: Path) -> None:
        parts = collect_checksums(beside)
        for folder in {(beside / name).parent for name in parts}:
            ShardedTensors(folder)  # of processes that see another disk here, no part would be found
        (beside / STATE).write_text(seal_state(state, step, parts))
        flush(beside)
        if exported.exists():  # before the checkpoint: a run that goes on from that will not write it again
            remove(place := final.with_name(f"{final.name}_hf"))
            move(exported, place)
        if final.exists():  # an earlier run's checkpoint of the same step
            move(final, final.with_name(f"{OLD}{final.name}"))
        move(beside, final)
        write_text(self.folder / LATEST, final.name)
        self.clean()

    def latest(self) -> Path | None:
        """The newest whole checkpoint, by its looks, whatever an interrupted write left behind."""
        return next((path for path in self._newest_first() if (path / STATE).exists()), None)

    def has_sign(self) -> bool:
        """Whether there is a checkpoint, whole or not, or was one: `load` will find it, or refuse."""
        return bool(self._all()) or (self.folder / LATEST).exists()

    def load(self) -> tuple[Path, dict] | None:
        """The newest checkpoint that is what was written, and its state; its tensors are read from the folder.

        Damaged ones are named and passed over. None: there is no checkpoint, nor a sign that there was one.
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
        """Of the newest checkpoint, before it is loaded and verified; None where `load` finds none, or refuses."""
        with suppress(OSError, ValueError, UserError):
            if (path := self.latest()) is not None:
                return unseal_state((path / STATE).read_text(), _step(path))["manifest"]
        return None

    def _candidates(self) -> list[Path]:
        """As the first process finds them: the others could look while it is still bringing one back."""
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
        """A checkpoint's state, and what is wrong with it. The processes read its files between them."""
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
        """What `latest` names, then those before it; without `latest`, all."""
        self._bring_back()
        every = self._all()[::-1]
        if (name := self._named()) is None:
            return every
        before = [path for path in every if _step(path) < _step(self.folder / name)]
        found = [path for path in every if path.name == name] + before
        if not found:
            raise UserError(
                f"--ckpt_path {self.folder}: the checkpoint that {LATEST} names ({name}) is gone, and there is none "
                f"before it; bring it back, or remove {LATEST} to start from the beginning"
            )
        return found

    def _named(self) -> str | None:
        """The checkpoint that `latest` names, if there is that file."""
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
        """Remove what interrupted writes left. A replaced checkpoint counts as garbage once its successor is there."""
        self._bring_back()
        for pattern in (f"{UNFINISHED}*", f"{OLD}*"):
            for path in self.folder.glob(pattern):
                remove(path)

    def _bring_back(self) -> None:
        """A checkpoint set aside for a successor that never came."""
        if self.world.is_rank_zero:
            for path in self.folder.glob(f"{OLD}*"):
                if not (place := path.with_name(path.name.removeprefix(OLD))).exists():
                    move(path, place)

    def _all(self) -> list[Path]:
        paths = [p for p in self.folder.glob(f"{PREFIX}*") if is_name(p.name)]
        return sorted(paths, key=_step)

    def _prune(self, newest: Path) -> None:
        """Oldest first, until both limits hold; the newest stays whatever they say."""
        kept = [p for p in self._all() if p != newest] + [newest]
        sizes = {p: _size(p) for p in kept}
        while len(kept) > 1 and (len(kept) > self.keep or sum(sizes[p] for p in kept) > self.keep_bytes):
            oldest = kept.pop(0)
            shutil.rmtree(oldest, ignore_errors=True)
            shutil.rmtree(oldest.with_name(oldest.name + "_hf"), ignore_errors=True)


def newest_of_run(options: CheckpointOptions, before: Mark | None) -> Path | None:
    """The newest that a run has written; what was the newest `before` it is its own only if it went on from there."""
    if newest_checkpoint_mark(options) == before and not options.load_checkpoint:
        return None
    return Checkpoints(Path(options.checkpoint_folder), keep=1, keep_gib=0).latest()


@contextmanager
def reading_checkpoint(path: Path) -> Iterator[None]:
    """A damaged checkpoint inside becomes one line."""
    try:
        yield
    except (OSError, SafetensorError, LookupError, TypeError, ValueError) as error:
        raise UserError(
            f"--ckpt_path {path}: damaged checkpoint ({reason(error)}); remove this folder to use the one before"
        ) from error


def is_name(text: str) -> bool:
    """Whether a checkpoint may be called so: never a path, which could lead anywhere."""
    digits = text.removeprefix(PREFIX)
    return digits != text and digits.isdecimal()


def _step(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix(PREFIX))


def _size(folder: Path) -> int:
    both = (folder, folder.with_name(folder.name + "_hf"))
    return sum(p.stat().st_size for f in both for p in f.rglob("*") if p.is_file())


# ---- a policy as training left it


WEIGHT = "weight/"  # what the optimizer puts before the name of a parameter


def restored_policy(pretrain: str, checkpoint: str | None, options: LoadOptions, device: Device) -> Policy:
    """`pretrain`: where the architecture comes from, and the weights too without a `checkpoint`. Only to score with."""
    folder = Path(checkpoint).expanduser() if checkpoint else None
    if folder is not None and (folder / "config.json").exists():
        return load_frozen_policy(str(folder), options, device, "--ckpt_path").model
    policy = load_frozen_policy(pretrain, options, device, "--pretrain").model
    if folder is not None:
        tensors = _tensors_of(folder)
        print(f"weights of {tensors}", flush=True)
        _fill(policy, tensors)
    return policy


def _tensors_of(folder: Path) -> Path:
    """The folder with the policy's tensors, of the newest checkpoint."""
    if (folder / "adapter_config.json").exists():
        raise UserError(
            f"--ckpt_path {folder}: an adapter, not a model; merge it first: {merging(folder, '--ckpt_path')}"
        )
    loaded = Checkpoints(folder, keep=1, keep_gib=0).load()
    if loaded is None:
        raise UserError(f"--ckpt_path {folder}: neither a model nor a checkpoint of training is in this folder")
    newest, _ = loaded
    # RL keeps a folder for each model that learns.
    return next((place for place in (newest / "actor", newest) if any(place.glob(PATTERN))), newest)


def _fill(policy: Policy, folder: Path) -> None:
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
