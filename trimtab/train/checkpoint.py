"""Resumable checkpoints that are whole or absent.

    ckpt_path/
      latest                     the name of the newest whole checkpoint
      global_step40/             state.json and tensors.safetensors (weights, Adam's moments), in parts if need be
      global_step40_hf/          with --save_hf_ckpt: the model as a Hugging Face folder

A checkpoint is written to a temporary folder, flushed to disk and renamed; only then is `latest` updated. Nothing here
is a pickle, so loading a checkpoint from an untrusted source runs no code. state.json holds the checksums of all files;
a damaged checkpoint is reported and the one before it is loaded.

Each process writes the blocks of the tensors it holds, and any number of processes with any sharding can read them
back. One process writes tensors.safetensors; several write tensors-00000-of-00002.safetensors and so on. The metadata
of every file lists its blocks of each tensor, the shapes of all tensors and the step, so that missing and mixed parts
are detected.

A file's checksum sums the 64-bit words of each piece of 1 MiB, and takes the CRC-32 of these sums and of the remaining
bytes. It runs at memory speed; a CRC of the whole file would take longer than reading the tensors. It detects damage by
disks, copies and manual edits; it is no protection against deliberate forgery.
"""

import hashlib
import json
import math
import shutil
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from trimtab.config.training_options import CheckpointOptions, LoadOptions
from trimtab.data.hub import merging
from trimtab.distributed.device import Device
from trimtab.distributed.fsdp import Block, Slices, blocks_of, is_first_holder, is_partition, local, whole_block
from trimtab.distributed.mesh import Mesh
from trimtab.distributed.process_group import World
from trimtab.errors import CannotWrite, UserError
from trimtab.files import UNFINISHED, flush, move, new_temporary_folder, reason, remove, write_text, writing
from trimtab.models.load import load_frozen_policy
from trimtab.models.policy import Policy
from trimtab.train.alarms import LATEST, Mark, newest_checkpoint_mark

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


# ---- checksums of files, and the sealed state

PIECE = 2**20  # bytes
SUM = ".sum"  # suffix of the file with a checksum, until rank 0 has copied it into the checkpoint's state
SEAL, STEP, PARTS = "checksum", "step", "parts"


def checksum(path: Path) -> dict[str, Any]:
    """Size and checksum of a file."""
    if (size := path.stat().st_size) == 0:
        return {"bytes": 0, "sums": "00000000"}
    content = np.memmap(path, dtype=np.uint8, mode="r")
    whole = size // PIECE * PIECE
    sums = content[:whole].view(np.uint64).reshape(-1, PIECE // 8).sum(axis=1, dtype=np.uint64)
    return {"bytes": size, "sums": f"{zlib.crc32(content[whole:], zlib.crc32(sums.tobytes())):08x}"}


def write_checksum(path: Path) -> None:
    path.with_name(path.name + SUM).write_text(json.dumps(checksum(path)))


def collect_checksums(folder: Path) -> dict[str, dict]:
    """Read and remove the checksum files of all processes; keys are paths relative to the folder."""
    sums = {}
    for path in sorted(folder.rglob(f"*{SUM}")):
        sums[str(path.relative_to(folder)).removesuffix(SUM)] = json.loads(path.read_text())
        path.unlink()
    return sums


def seal_state(state: dict, step: int, parts: dict[str, dict]) -> str:
    """A checkpoint's state as JSON with a checksum of itself."""
    state = {**state, STEP: step, PARTS: parts}
    return json.dumps({SEAL: _digest(state), **state})


def unseal_state(text: str, step: int) -> dict:
    """Parse and verify the state of the checkpoint of `step`. ValueError: it was changed, or is incomplete."""
    state = json.loads(text)
    if not isinstance(state, dict):
        raise ValueError("state.json holds no object")
    if state.pop(SEAL, None) != _digest(state):
        raise ValueError("state.json is not what was written: its checksum differs")
    for name, kind in (("counters", dict), ("manifest", dict), ("random", list | dict)):
        if not isinstance(state.get(name), kind):
            raise ValueError(f"state.json has no {name}")
    counters = state["counters"]
    if counters.get("step", counters.get("iteration")) != step or state.get(STEP) != step:
        raise ValueError("state.json is of another step")
    return state


def find_damage(folder: Path, parts: Iterable[tuple[str, dict]]) -> str | None:
    """Describe the first of these files that is missing or differs from its checksum; None if all are intact."""
    for name, expected in parts:
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != expected.get("bytes"):
            return f"{name} has {path.stat().st_size} bytes instead of {expected.get('bytes')}"
        if checksum(path) != expected:
            return f"{name} is not what was written: its checksum differs"
    return None


def _digest(state: dict) -> str:
    return hashlib.blake2b(json.dumps(state, sort_keys=True).encode(), digest_size=16).hexdigest()


# ---- tensors in parts


PATTERN = "tensors*.safetensors"


def write_sharded(folder: Path, tensors: dict[str, Tensor], mesh: Mesh, step: int) -> None:
    """Write this process's parts of the tensors and flush them to disk; rank 0 writes replicated tensors."""
    held = {
        name: tensor
        for name, tensor in tensors.items()
        if is_first_holder(tensor) and (local(tensor) is not tensor or mesh.is_rank_zero)
    }
    name = "tensors" if mesh.size == 1 else f"tensors-{mesh.all.rank:05d}-of-{mesh.size:05d}"
    path = folder / f"{name}.safetensors"
    folder.mkdir(parents=True, exist_ok=True)
    write_file(
        path,
        {name: local(tensor).detach().contiguous().cpu() for name, tensor in held.items()},
        {name: blocks_of(tensor) for name, tensor in held.items()},
        {name: list(tensor.shape) for name, tensor in tensors.items()},
        step,
    )
    flush(path)
    write_checksum(path)


def write_file(
    path: Path, parts: dict[str, Tensor], blocks: dict[str, list[Block]], shapes: dict[str, list[int]], step: int
) -> None:
    """Write one process's parts and the blocks they fill. `shapes` covers all tensors, also those without a part
    here."""
    notes = {"blocks": json.dumps(blocks), "shapes": json.dumps(shapes), "step": str(step)}
    save_file(parts, path, metadata=notes)


def all_finite(tensors: Iterable[Tensor]) -> bool:
    """Whether all values in this process's parts are finite."""
    for tensor in tensors:
        part = local(tensor).detach()
        # A sum is fast, and not finite if any value is not. It may also overflow, so the slow check confirms.
        if part.is_floating_point() and not math.isfinite(part.sum()) and not bool(part.isfinite().all()):
            return False
    return True


class ShardedTensors:
    """The sharded tensors of a folder, read lazily. ValueError: parts are missing, overlap, or differ in step."""

    def __init__(self, folder: Path):
        paths = sorted(folder.glob(PATTERN))
        promised = int(paths[0].stem.rpartition("-of-")[2]) if paths and "-of-" in paths[0].stem else 1
        if len(paths) != promised:
            raise ValueError(f"{len(paths)} of {promised} parts are there")
        self._files = [safe_open(path, framework="pt") for path in paths]
        self._places: dict[str, list[tuple[Block, int]]] = {}  # blocks of each tensor, with the index of their file
        self._shapes: dict[str, list[int]] = {}
        steps = set()
        for index, file in enumerate(self._files):
            notes = file.metadata() or {}
            self._shapes |= json.loads(notes["shapes"])
            steps.add(notes["step"])
            for name, blocks in _blocks_in(file, notes):
                self._places.setdefault(name, []).extend((block, index) for block in blocks)
        if len(steps) > 1:
            raise ValueError(f"its parts are of different steps ({', '.join(sorted(steps))})")
        self.step = int(steps.pop())
        for name, shape in self._shapes.items():
            blocks = [block for block, _ in self._found(name)]
            if not is_partition(blocks, shape):
                here, needed = sum(block.size for block in blocks), math.prod(shape)
                short = f"{name} has {here:,} of {needed:,} numbers"
                raise ValueError(short if here != needed else f"parts of {name} overlap or lie outside of it")

    def __contains__(self, name: str) -> bool:
        return name in self._places

    def names(self) -> list[str]:
        return list(self._places)

    def whole(self, name: str) -> Tensor:
        (_, index), *more = self._found(name)
        if not more:
            return self._files[index].get_tensor(name)
        tensor = torch.empty(self._shapes[name], dtype=self._files[index].get_slice(name)[:0].dtype)
        self.read_into(name, tensor)
        return tensor

    def read_into(self, name: str, tensor: Tensor) -> None:
        """Copy a stored tensor into `tensor`, or into this process's part of it, in place."""
        places, target = self._found(name), local(tensor)
        found, wanted = self._shapes[name], list(tensor.shape)
        if found != wanted:
            few = found[1:] == wanted[1:] and found and wanted
            raise ValueError(
                f"{name} has {found[0]} of {wanted[0]} rows" if few else f"{name} has shape {found}, not {wanted}"
            )
        for own in blocks_of(tensor):
            for block, index in places:
                if (both := own.common(block)) is not None:
                    here, there = both
                    target[here].copy_(self._read(index, name, there))

    def differing(self, tensors: dict[str, Tensor]) -> list[str]:
        """Names whose tensors, in this process, are not these, bit for bit."""
        wrong = self._places.keys() ^ tensors.keys()
        for name in tensors.keys() - wrong:
            stored = torch.zeros_like(tensors[name])
            self.read_into(name, stored)
            if not torch.equal(local(stored), local(tensors[name])):
                wrong.add(name)
        return sorted(wrong)

    def _read(self, index: int, name: str, where: Slices) -> Tensor:
        return self._files[index].get_slice(name)[where] if where else self._files[index].get_tensor(name)

    def _found(self, name: str) -> list[tuple[Block, int]]:
        if name not in self._places:
            raise ValueError(f"there is no {name} in it")
        return self._places[name]


def _blocks_in(file: Any, notes: dict[str, str]) -> Iterator[tuple[str, list[Block]]]:
    """The blocks of each tensor that a file's metadata lists, checked against the stored shapes."""
    noted = json.loads(notes["blocks"])
    for name in file.keys():  # noqa: SIM118 (not a dict)
        stored = whole_block(file.get_slice(name).get_shape())
        blocks = [Block(*map(tuple, block)) for block in noted[name]]
        if not is_partition([block._replace(offsets=block.place) for block in blocks], stored.lengths):
            raise ValueError(f"its parts of {name} are not those that it names")
        yield name, blocks or [stored]


class HostTensors:
    """A copy of this process's parts in main memory, for a model that is rebuilt with the same sharding."""

    def __init__(self, tensors: dict[str, Tensor]):
        self._tensors = {name: local(tensor).detach().to("cpu", copy=True) for name, tensor in tensors.items()}

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def whole(self, name: str) -> Tensor:
        return self._tensors[name]

    def read_into(self, name: str, tensor: Tensor) -> None:
        local(tensor).copy_(self._tensors[name])

    def differing(self, tensors: dict[str, Tensor]) -> list[str]:
        """Names whose tensors are not these, bit for bit."""
        names = self._tensors.keys() & tensors.keys()
        same = {name for name in names if torch.equal(self._tensors[name], local(tensors[name]).detach().cpu())}
        return sorted((self._tensors.keys() | tensors.keys()) - same)
