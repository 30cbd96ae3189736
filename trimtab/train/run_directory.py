"""The run directory: manifest, free disk space, setting aside finished runs, lock, and the unfinished mark."""

import dataclasses
import hashlib
import json
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from trimtab import __version__
from trimtab.config.data_options import DataOptions, RowOptions
from trimtab.config.placement_options import ShardingOptions
from trimtab.config.resolved_config import to_dict, to_yaml
from trimtab.config.training_options import CheckpointOptions, LoggingOptions, RunOptions, checkpoints_in
from trimtab.distributed.process_group import World
from trimtab.errors import UserError
from trimtab.files import (
    is_unfinished,
    locked,
    mark_finished,
    mark_unfinished,
    move,
    remove,
    remove_leftovers,
    write_json,
    write_text,
    writing,
)
from trimtab.models.load import TrainedModelOptions
from trimtab.train.checkpoint import Checkpoints


def names_fingerprint(tensors: dict[str, Tensor]) -> str:
    """Hash of the tensors' names and shapes."""
    listing = "\n".join(f"{name} {tuple(t.shape)}" for name, t in sorted(tensors.items()))
    return hashlib.blake2b(listing.encode(), digest_size=16).hexdigest()


def versions() -> dict[str, str]:
    import importlib.metadata as metadata

    found = {"trimtab": __version__, "python": platform.python_version()}
    for package in ("torch", "transformers", "datasets", "peft", "numpy", "safetensors"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def make_manifest(
    *,
    job: str,
    weights: str,
    data_order: str,
    seed: int,
    dtype: str,
    device: dict[str, Any],
    path: str,
    not_exact: str,
    **more,
) -> dict:
    """`device`: Device.described(); `not_exact`: why layers do not run on the engine's kernels (--exact)."""
    return {
        "job": job,
        "initial_weights": weights,
        "data_order": data_order,
        "seed": seed,
        "dtype": dtype,
        **device,
        "attention_path": path,
        "exact": not not_exact,
        **({"not_exact": not_exact} if not_exact else {}),
        "versions": versions(),
        **more,
    }


# Options that decide only where, when and how fast, and options whose effect has its own fingerprint. All others change
# the results.
WITHOUT_EFFECT = {
    field.name
    for group in (CheckpointOptions, LoggingOptions, ShardingOptions, RowOptions, DataOptions, RunOptions)
    for field in dataclasses.fields(group)
}
WITHOUT_EFFECT |= {"micro_train_batch_size", "packing_samples", "train_max_tokens_per_gpu", "gradient_checkpointing"}
WITHOUT_EFFECT |= {
    "gradient_checkpointing_use_reentrant",
    "flash_attn",
    "bf16",
    "use_ms",
    "disable_fast_tokenizer",
    "exact",
}
WITHOUT_EFFECT |= {"gradient_checkpointing_layers", "gradient_checkpointing_keep", "offload_activations", "compile"}
WITHOUT_EFFECT |= {"use_dynamic_batch", "fit_memory", "ray", "max_restarts", "restart_wait"}
WITHOUT_EFFECT |= {"ref_offload", "teacher_offload", "precompute_ref_log_probs", "report_samples", "pretrain"}

MEANING = ("lora_alpha", "optimizer", "proposal", "proposal_lora_rank")
"""Options without which the tensors of a checkpoint cannot be interpreted."""


def learning_settings(options: TrainedModelOptions) -> dict[str, Any]:
    """The options that change the results, as plain values."""
    return {name: value for name, value in to_dict(options).items() if name not in WITHOUT_EFFECT}


def compare_manifests(saved: dict, current: dict, checkpoint: Path) -> list[str]:
    """Raise UserError if the checkpoint cannot be continued; return a warning for each change that only costs
    bit-for-bit equality."""
    named = {
        "job": "was written by another job",
        "initial_weights": "belongs to another model (its initial weights differ from --pretrain's)",
        "trainable": "belongs to another model (other trained parameters: check the LoRA options)",
        "data_order": "was trained on other data, or in another order (dataset, --train_batch_size or --seed changed)",
    }
    lines = []
    for key, problem in named.items():
        if saved.get(key) != current.get(key):
            raise UserError(
                f"--ckpt_path {checkpoint}: this checkpoint {problem}; give its own settings, or another --ckpt_path"
            )
    before, now = (manifest.get("settings", {}) for manifest in (saved, current))
    changed = [name for name in sorted(before.keys() & now.keys()) if before[name] != now[name]]
    for name in MEANING:
        if name in changed:
            raise UserError(
                f"--ckpt_path {checkpoint}: --{name} was {before[name]} there; what was learnt means something else "
                "under another one, so give the same"
            )
    for name in changed:
        lines.append(f"resumed with another --{name} ({json.dumps(before[name])} -> {json.dumps(now[name])})")
    if saved.get("exact", False) != current.get("exact", False):
        lines.append("resumed with other kernels (--exact): not bit for bit the uninterrupted run")
    if saved.get("environment") != current.get("environment"):
        lines.append("the environment's file has changed since: episodes that were under way may begin anew")
    for key in ("seed", "dtype", "device_type", "threads", "fused_optimiser", "attention_path", "layout", "versions"):
        if saved.get(key) != current.get(key):
            was, now = json.dumps(saved.get(key)), json.dumps(current.get(key))
            lines.append(f"resumed with another {key} ({was} -> {now}): not bit for bit the uninterrupted run")
    return lines


# ---- disk space


SMALL_FILES = 16 * 2**20  # tokenizer, descriptions, metrics
EVERY = 30.0  # seconds between two checks


class SpaceWatch:
    """Warns when the disk has too little space for the final model and the next checkpoint."""

    def __init__(self, options: CheckpointOptions, *, model: int, checkpoint: int):
        """`model`, `checkpoint`: their sizes in bytes; both are written before older ones are removed."""
        self._needs = [("save_path", Path(options.save_path), "the model at the end", model + SMALL_FILES)]
        if options.save_steps > 0 and not options.disable_ds_ckpt:
            self._needs.append(("ckpt_path", Path(options.checkpoint_folder), "the next checkpoint", checkpoint))
        self._last = -EVERY
        self._warned = False

    def warning(self) -> str | None:
        """A warning when space becomes short, once until there is enough again; checks the disk every EVERY seconds."""
        if time.monotonic() - self._last < EVERY:
            return None
        self._last = time.monotonic()
        short = self._shortage()
        new, self._warned = short is not None and not self._warned, short is not None
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


def _nearest(folder: Path) -> Path:
    return next(path for path in (folder, *folder.resolve().parents) if path.exists())


def _size(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"


@contextmanager
def scratch_folder(options: CheckpointOptions, needed: int, world: World) -> Iterator[Path | None]:
    """A temporary folder on the disk of the checkpoints, the same in all processes. None: it has no such room."""
    near, made = _nearest(Path(options.checkpoint_folder)).resolve(), None
    with ExitStack() as stack:
        if world.is_rank_zero and shutil.disk_usage(near).free >= needed + SMALL_FILES:
            with writing(f"--ckpt_path {options.checkpoint_folder}: cannot write there"):
                made = stack.enter_context(tempfile.TemporaryDirectory(prefix=".trimtab-check-", dir=near))
        made = world.gather(made)[0]
        yield None if made is None else Path(made)


# ---- earlier runs in the same folder


MODEL_FILES = ("config.json", "adapter_config.json")
READ = (
    *("pretrain", "ref_pretrain", "teacher_model", "critic_pretrain", "reward_pretrain", "dataset", "prompt_data"),
    *("eval_dataset", "pretrain_data", "heldout_prompt_data", "reward_func", "replay", "agent_func_path"),
)
"""Options that name inputs; a run must not set aside a folder that it reads from."""


def set_aside_finished_run(options: CheckpointOptions, say: Callable[[str], None]) -> None:
    """Rename a finished run in the folder, or with --overwrite remove its checkpoints."""
    folder = Path(os.path.normpath(Path(options.save_path).expanduser()))
    if not is_finished(folder):
        return
    if options.load_checkpoint and Checkpoints(Path(options.checkpoint_folder), keep=1, keep_gib=0).has_sign():
        return  # the run is resumed, or refused later
    if options.overwrite:
        remove(Path(checkpoints_in(str(folder))))
        return
    for name in READ:
        for place in str(to_dict(options).get(name) or "").split(","):
            found = Path(place.strip()).expanduser().resolve()
            if place.strip() and folder.resolve() in (found, *found.parents):
                raise UserError(
                    f"--{name} {place.strip()} lies in --save_path {folder}, whose finished run would be set aside: "
                    "give another --save_path, or --overwrite"
                )
    if folder.name in ("", "..") or folder.resolve() == Path.cwd():
        raise UserError(f"--save_path {folder} holds a finished run: give another folder, or --overwrite")
    places = (folder.with_name(f"{folder.name}.old-{number}") for number in range(1, 10_000))
    aside = next(place for place in places if not place.exists())
    with writing(f"--save_path {folder}: cannot set aside the finished run there"):
        move(folder, aside)
    say(f"{folder} held a finished run, which is now {aside} (--overwrite replaces one)")


def is_finished(folder: Path) -> bool:
    """Whether the folder has a completed run: a manifest, a model, and no unfinished mark."""
    described = (folder / "manifest.json").is_file() and not is_unfinished(folder)
    return described and any((folder / name).is_file() for name in MODEL_FILES)


# ---- the directory of a running job


MODELS = ("critic", "proposal")  # subfolders with other models


class RunDirectory:
    """Locks, describes and marks the folder of a run."""

    def __init__(self, options: TrainedModelOptions, manifest: dict, world: World | None = None):
        self.options, self.manifest = options, manifest
        self.path = Path(options.save_path)
        self.world = world or World()

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the folders for this run. Rank 0 locks for all processes, and all raise if it cannot."""
        with ExitStack() as locks:
            problem = None
            if self.world.is_rank_zero:
                try:
                    set_aside_finished_run(self.options, self.world.say)
                    for flag, folder in ((flag, Path(place)) for flag, place in self.options.own_folders.items()):
                        with writing(f"--{flag} {folder}: cannot write there"):
                            locks.enter_context(locked(flag, folder))
                except UserError as error:
                    problem = str(error)
            if failure := next((found for found in self.world.gather(problem) if found), None):
                raise UserError(failure)
            yield

    def describe(self) -> None:
        """Write options and manifest, and mark the folder unfinished: a model in it is an earlier run's until
        `finish`."""
        with writing(f"--save_path {self.path}: cannot write there"):
            for folder in (self.path, *(self.path / name for name in MODELS)):
                remove_leftovers(folder)
            mark_unfinished(self.path)
            write_text(self.path / "options.yaml", to_yaml(self.options))
            write_json(self.path / "manifest.json", self.manifest)

    def finish(self) -> None:
        if self.world.is_rank_zero:
            mark_finished(self.path)
