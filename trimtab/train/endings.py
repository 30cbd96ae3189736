"""What a run says when it ends badly, in words that supervised and RL runs share. Imports nothing heavy: the process
that launches a run says it too."""

from contextlib import suppress
from pathlib import Path

from trimtab.config.groups import CheckpointOptions

LATEST = "latest"  # the file that names the newest checkpoint of its folder

Mark = tuple[str, int]


def mark_of_newest(options: CheckpointOptions) -> Mark | None:
    """What is the newest in a run's folder, and when it became so by the clock of whoever keeps the files: only looked
    at, since the folder may be another run's."""
    latest = Path(options.checkpoint_folder) / LATEST
    with suppress(OSError):
        return latest.read_text(), latest.stat().st_mtime_ns
    return None


def go_on_from(saved: Path | None) -> str:
    """`saved`: the checkpoint that was written for this ending."""
    if saved is None:
        return "no checkpoint was written, as --disable_ds_ckpt asks"
    return f"checkpoint saved in {saved}; add --load_checkpoint to go on"


def last_checkpoint(last: Path | None) -> str:
    """`last`: the newest that a run has written, which could write none for its end."""
    if last is None:
        return "this run has no checkpoint to go on from"
    return f"the last checkpoint is {last}; add --load_checkpoint to go on"


def not_finite(when: str, last: Path | None) -> str:
    """`last`: the newest checkpoint, all of whose numbers are finite, as all are that were written."""
    go_on = f"the last checkpoint is {last}; add --load_checkpoint to go on from there" if last else "start again"
    return f"the weights or Adam's moments are not finite {when}, so they were not saved; {go_on}, more slowly"


def ended_badly(count: int, what: str, folder: Path) -> str:
    return (
        f"loss or gradient was not finite in the last {count} {what}, which therefore taught nothing; the model as it "
        f"was before them is in {folder}; lower the learning rate, or look at the last of the data"
    )
