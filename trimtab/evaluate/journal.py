"""What is done of a long job, so that a job that was killed goes on without repeating or losing anything.

Beside the output FILE stands the folder FILE.partial: settings.json says what work it is, and each process appends the
items it has finished to a file of its own, a line each. At the end the rows are written beside the output and renamed:
the output is whole or absent. A last line that was cut off is made anew.
"""

import json
import os
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any, TextIO

from trimtab.config.jobs import GenerateOptions
from trimtab.data.conversion import post_process
from trimtab.distributed.process_group import World
from trimtab.errors import Interrupted, UserError
from trimtab.files import replacing, write_json, writing
from trimtab.interrupts import StopRequest
from trimtab.progress import RunProgress
from trimtab.sandbox.process import RunStopped

SETTINGS = "settings.json"


class Journal:
    def __init__(self, output: str, settings: dict[str, Any], correctable: Collection[str] = ()):
        """`settings`: everything the items depend on. Unfinished work of others is refused, not thrown away.

        `correctable`: settings that bind only when an item is finished: what failed before may be mended.
        """
        self.output = Path(output).expanduser()
        self.folder = self.output.with_name(f"{self.output.name}.partial")
        self.settings = json.loads(json.dumps(settings))
        with self._writing():
            self.done: dict[int, Any] = dict(self._items())
            self._check_settings(() if self.done else correctable)
        self._lines: TextIO | None = None

    def open(self, rank: int) -> None:
        """Be ready to write. Every process must have read what is done before any of them does this."""
        with self._writing():
            self.folder.mkdir(parents=True, exist_ok=True)
            if rank == 0:
                write_json(self.folder / SETTINGS, self.settings, indent=1)
            path = self.folder / f"{rank}.jsonl"
            path.touch()
            whole = path.read_bytes().rpartition(b"\n")
            os.truncate(path, len(whole[0]) + len(whole[1]))
            self._lines = path.open("a", encoding="utf-8")

    def write(self, item: int, value: Any) -> None:
        """An item is finished, and outlives this process."""
        assert self._lines is not None
        with self._writing():
            self._lines.write(json.dumps([item, value], ensure_ascii=False) + "\n")
            self._lines.flush()
        self.done[item] = value

    def close(self) -> None:
        if self._lines is not None:
            with suppress(OSError):  # items are flushed one by one: a failure has been told, and must not be hidden
                self._lines.close()

    def gather(self) -> None:
        """Know what the other processes have finished."""
        self.done |= dict(self._items())

    def finish(self, rows: list[dict[str, Any]]) -> None:
        """Write the output and leave nothing else."""
        with self._writing():
            # In the folder of unfinished work, where whatever a killed process leaves goes with the rest.
            with replacing(self.output, within=self.folder) as beside, beside.open("w", encoding="utf-8") as file:
                file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
            shutil.rmtree(self.folder)

    def _check_settings(self, free: Collection[str]) -> None:
        path = self.folder / SETTINGS
        if not path.exists():
            return
        try:
            found = json.loads(path.read_bytes())
            if not isinstance(found, dict):
                raise ValueError
        except (ValueError, RecursionError) as error:
            raise self._damaged(f"{path} does not tell what work it is") from error
        binding = [name for name in {**found, **self.settings} if name not in free]
        differing = [name for name in binding if _given(found.get(name)) != _given(self.settings.get(name))]
        if differing:
            raise UserError(
                f"{self.folder} holds unfinished work with another {', '.join(differing)}: repeat that command to "
                "finish it, delete the folder, or give another --output_path"
            )

    def _items(self) -> Iterator[tuple[int, Any]]:
        for path in sorted(self.folder.glob("*.jsonl")):
            for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], start=1):
                try:
                    item, value = json.loads(line)
                    if type(item) is not int:
                        raise ValueError
                except (TypeError, ValueError, RecursionError) as error:
                    raise self._damaged(f"line {number} of {path} is no finished item") from error
                yield item, value

    def _damaged(self, what: str) -> UserError:
        return UserError(
            f"--output_path {self.output}: {what}; remove that line, or the folder {self.folder} to begin anew"
        )

    def _writing(self) -> AbstractContextManager[None]:
        return writing(f"--output_path {self.output}: cannot write there")


# ---- A long job on many items, in one process or several: shown while it goes on, and resumable (journal.py).


Results = Iterable[tuple[int, Any]]


def work_through(
    items: int,
    journal: Journal,
    world: World,
    work: Callable[[list[int]], Results],
    figures: Callable[[], dict],
    what: str,
    stop: StopRequest,
) -> None:
    """Have every item done once: `work` gets those of this process and gives back (item, result) as they are finished.

    Afterwards the first process knows all results. `figures` are shown beside the bar.
    """
    left = [item for item in range(items) if item not in journal.done]
    mine = left[world.rank :: world.size]
    before = items - len(left)
    world.wait()
    journal.open(world.rank)
    if before:
        world.say(f"{before:,} of {items:,} {what} are done already, in {journal.folder}")
    total = len(mine) + before
    bar = RunProgress(what, total, before) if world.is_rank_zero and mine else None
    try:
        for count, (item, result) in enumerate(work(mine) if mine else (), start=before + 1):
            journal.write(item, result)
            if bar is not None:
                bar.advance(count, figures())
            if stop.requested():
                raise RunStopped
        world.wait()
    except (Interrupted, RunStopped, RuntimeError) as error:  # the last: another process has left a collective
        if not stop.requested():
            raise
        done = f"{len(journal.done):,} of {items:,} {what}"
        raise Interrupted(stop.number, f"stopped after {done}; the same command goes on from there") from error
    finally:
        if bar is not None:
            bar.close()
        journal.close()
    if world.is_rank_zero:
        journal.gather()


def write_rows(rows: list[dict[str, Any]], journal: Journal, options: GenerateOptions) -> None:
    """The rows, or what the post-processor makes of them, become the output."""
    scored = [row["reward"] for row in rows if "reward" in row]
    made = rows
    if options.post_processor is not None:
        made = post_process(
            rows, options.post_processor, reward_template=options.reward_template, normalize=options.normalize_reward
        )
    if not made:
        print(f"{'note':9}no prompt has answers with different rewards: there is nothing to learn from")
    journal.finish(made)
    if scored:
        print(f"{'reward':9}mean {sum(scored) / len(scored):.4f}, from {min(scored):.4f} to {max(scored):.4f}")
    kind = f" ({options.post_processor})" if options.post_processor else ""
    print(f"{'rows':9}{journal.output}: {len(made):,}{kind} of {len(rows):,} answers", flush=True)


def _given(setting: Any) -> Any:
    """A setting without what is unset, which an earlier version may not have known."""
    is_dict = isinstance(setting, dict)
    return {name: value for name, value in setting.items() if value is not None} if is_dict else setting
