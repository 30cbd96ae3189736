"""The folder of a run before it begins: a finished run in it makes way. And checkpoints where they used to be."""

import os
from collections.abc import Callable
from pathlib import Path

from trimtab.config.dump import to_dict
from trimtab.config.groups import CheckpointOptions, checkpoints_in
from trimtab.config.jobs import TrainedOptions
from trimtab.distributed.process_group import World
from trimtab.errors import UserError
from trimtab.files import is_unfinished, move, remove, writing
from trimtab.train.checkpoint import Checkpoints
from trimtab.train.manifest import compare

MODEL_FILES = ("config.json", "adapter_config.json")
READ = (
    *("pretrain", "ref_pretrain", "teacher_model", "critic_pretrain", "reward_pretrain", "dataset", "prompt_data"),
    *("eval_dataset", "pretrain_data", "heldout_prompt_data", "reward_func", "replay", "agent_func_path"),
)
"""Options whose places are read; a run must not set aside what it reads."""


def make_way(options: CheckpointOptions, say: Callable[[str], None]) -> None:
    """Set a finished run in the folder aside, or with --overwrite remove what would mix with the new one."""
    folder = Path(os.path.normpath(Path(options.save_path).expanduser()))
    if not is_finished(folder):
        return
    if options.load_checkpoint and Checkpoints(Path(options.checkpoint_folder), keep=1, keep_gib=0).has_sign():
        return  # the run goes on, or is refused
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
    """Whether a run ended well there: it left its description and a whole model."""
    described = (folder / "manifest.json").is_file() and not is_unfinished(folder)
    return described and any((folder / name).is_file() for name in MODEL_FILES)


def earlier_checkpoint(options: TrainedOptions, manifest: dict, world: World) -> tuple[Path, dict] | None:
    """For a run that finds no checkpoint and was not told where to look: one in the folder that all runs of a verb used
    to share, if it is this run's."""
    if "ckpt_path" in options.given:
        return None
    shared = Path("./ckpt") / f"checkpoints_{'ppo_ray' if options.verb == 'ppo' else options.verb}"
    if not shared.is_dir():
        return None
    try:
        found = Checkpoints(shared, keep=1, keep_gib=0, world=world).load()
        if found is None:
            return None
        compare(found[1]["manifest"], manifest, found[0])
    except UserError:  # another run's, or nobody's any more
        return None
    world.say(f"no checkpoint in {options.ckpt_path}: {found[0]}, where they used to be, is of this run and is used")
    return found
