"""A long job on many items, in one process or several: shown while it goes on, and resumable (journal.py)."""

from collections.abc import Callable, Iterable
from typing import Any

from trimtab.config.jobs import GenerateOptions
from trimtab.data.post_processing import post_process
from trimtab.distributed.process_group import World
from trimtab.errors import Interrupted
from trimtab.evaluate.journal import Journal
from trimtab.interrupts import StopRequest
from trimtab.progress import RunProgress
from trimtab.sandbox.process import RunStopped

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
