"""`trimtab serve` with a line for everything its engine does, as JSON: where a round of requests spends its time.

    python benchmarks/serve_timeline.py TIMELINE.jsonl MODEL [options of trimtab serve]
    python benchmarks/serve_timeline.py --show TIMELINE.jsonl [--since SECONDS] [--lines 200]

`benchmarks/serve_speed.py --timeline FILE` starts its server like this. Kinds: `idle` (nothing to do), `gather` (those
that return together are read), `work` (all of a look), `begin` (reading, and first tokens), `look` (steps of recorded
graphs), `read` (a pass, and how: recorded, or launched kernel by kernel), `record read`, `record steps`, `hand over`
(answers), `letters` (the same, sent to the HTTP side). `at` and `seconds` are by the clock, `host` is the thread's time
on a core; a read that was recorded goes on when its line has ended. What is inside another line is counted in both.
"""

import argparse
import atexit
import json
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

LINES: list[dict[str, Any]] = []


def noted(owner: type, name: str, kind: str, about: Callable[..., dict[str, Any]] = lambda *a, **k: {}) -> None:
    """Calls of this method become lines; `about` gets what it was given."""
    inner = getattr(owner, name)

    def outer(*given: Any, **named: Any) -> Any:
        said, began, host = about(*given, **named), time.monotonic(), time.thread_time()
        try:
            return inner(*given, **named)
        finally:
            now = time.monotonic()
            line = {"kind": kind, "at": round(began, 5), "seconds": round(now - began, 6)}
            LINES.append({**line, "host": round(time.thread_time() - host, 6), **said})

    setattr(owner, name, outer)


def note_all() -> None:
    from trimtab.rollout.builtin.cuda_graphs import DecodeGraphs, PrefillGraph, PrefillGraphs
    from trimtab.rollout.builtin.engine import BuiltinSession
    from trimtab.server.http_workers import HTTPWorkers
    from trimtab.server.request_queue import RequestQueue

    def of_pass(one: PrefillGraph, *_: Any) -> dict[str, Any]:
        how = "launched" if one.graph is None else "recorded"
        keys = 0 if one.keys is None else len(one.keys)
        return {"tokens": one.tokens.shape[1], "sequences": one.sequences.shape[1], "keys": keys, "how": how}

    noted(RequestQueue, "wait", "idle")
    noted(RequestQueue, "gather", "gather", lambda queue, _: {"waiting": len(queue._new)})
    noted(RequestQueue, "step", "work", lambda queue, *_: {"at_work": len(queue._running), "waiting": len(queue._new)})
    noted(RequestQueue, "finish", "hand over", lambda _, rollouts, **__: {"answers": len(rollouts)})
    noted(BuiltinSession, "_begin", "begin", lambda *given: {"rows": len(given[2])})
    noted(BuiltinSession, "prepare", "prepare")
    noted(PrefillGraph, "run", "read", of_pass)
    noted(PrefillGraphs, "_capture", "record read")
    noted(DecodeGraphs, "run", "look", lambda _, __, rows, steps, *___: {"rows": len(rows), "steps": steps})
    noted(DecodeGraphs, "_capture", "record steps", lambda _, __, rows: {"rows": rows})
    noted(HTTPWorkers, "_deliver", "letters", lambda workers: {"answers": len(workers.settled)})


def show(path: str, since: float | None, most: int) -> None:
    """Sums by kind of the last burst (or since a time), and its lines."""
    lines = sorted(map(json.loads, Path(path).read_text().splitlines()), key=lambda line: line["at"])
    if since is None:  # after the longest pause: the timed part, behind the warming up
        looks = [line["at"] for line in lines if line["kind"] == "work"]
        gaps = [(after - before, after) for before, after in pairwise(looks)]
        since = max(gaps)[1] - 0.05 if gaps else 0.0
    lines = [line for line in lines if line["at"] >= since]
    sums: dict[str, list[float]] = {}
    for line in lines:
        kind = f"{line['kind']} {line['how']}" if "how" in line else line["kind"]
        found = sums.setdefault(kind, [0, 0.0, 0.0])
        for place, value in enumerate((1, line["seconds"], line["host"])):
            found[place] += value
    print(f"{'kind':18s} {'times':>7s} {'seconds':>9s} {'of a core':>9s}   from {since:.3f}")
    for kind, (count, seconds, host) in sorted(sums.items()):
        print(f"{kind:18s} {count:7.0f} {seconds:9.3f} {host:9.3f}")
    steps = sum(line["steps"] for line in lines if line["kind"] == "look")
    rows = sum(line["steps"] * line["rows"] for line in lines if line["kind"] == "look")
    print(f"{steps} steps, {rows / max(1, steps):.0f} rows in the mean")
    for line in [line for line in lines if line["kind"] not in ("idle", "work") or line["seconds"] > 0.001][:most]:
        rest = " ".join(f"{key} {line[key]}" for key in line if key not in ("kind", "at", "seconds", "host"))
        print(f"{(line['at'] - since) * 1e3:9.1f} ms  {line['kind']:12s} {line['seconds'] * 1e3:8.2f} ms  {rest}")


def main() -> None:
    how = argparse.RawDescriptionHelpFormatter
    words = argparse.ArgumentParser(description=__doc__, formatter_class=how, allow_abbrev=False)
    words.add_argument("--show", action="store_true", help="add a timeline up in place of making one")
    words.add_argument("--since", type=float, help="seconds; unset: what follows the longest pause")
    words.add_argument("--lines", type=int, default=200, help="of it, at most")
    words.add_argument("timeline")
    arguments, given = words.parse_known_args()
    if arguments.show:
        return show(arguments.timeline, arguments.since, arguments.lines)
    from trimtab.cli.serve_rm import serve_main as serve

    path = Path(arguments.timeline)
    note_all()
    atexit.register(lambda: path.write_text("".join(json.dumps(line) + "\n" for line in LINES)))
    serve(given)
    return None


if __name__ == "__main__":
    main()
