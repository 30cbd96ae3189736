"""What two golden runs must agree on: every file that they wrote, bit for bit but for clocks and memory."""

import fnmatch
import json
import re
from pathlib import Path

# Clock readings, memory, and what is computed from files that hold them: keys, at any depth.
VOLATILE = re.compile("seconds|per_second|memory_gib|^checksum$|^sums$|^wandb_run_name|^exact$")  # exact: a new option
# In episodes which turns meet in a pass depends on who answers when, and with it the last bits of the log-probs that
# the engine drew with. Nothing is computed from those but these figures.
OF_DRAWING = re.compile("^(sampled_entropy|first_entropy|log_prob_gap|log_prob_ratio)$")
# Logs for people, the files of other tools, pages drawn from what is compared anyway.
IGNORED = ("log.txt", "calls", "*.html", "*events.out.tfevents*", "*.lock", "*__pycache__/*")
# Of a run that was interrupted: what is left in the end. Stopping leaves a checkpoint more.
RESULTS = ("out/*.safetensors", "out/*.jsonl", "out.jsonl", "out/config.json")


def differences(
    base: Path, tree: Path, names: dict[bytes, bytes], *, results_only: bool = False, episodes: bool = False
) -> list[str]:
    """One line for each file that differs; empty if the runs are equal. `names`: absolute paths of BASE, and what they
    are in the working tree."""
    left_out = re.compile(f"{VOLATILE.pattern}|{OF_DRAWING.pattern}") if episodes else VOLATILE
    found = {side: _files(folder, results_only) for side, folder in (("base", base), ("tree", tree))}
    lines = [f"{name} is missing" for name in sorted(found["base"] - found["tree"])]
    lines += [f"{name} is new" for name in sorted(found["tree"] - found["base"])]
    for name in sorted(found["base"] & found["tree"]):
        a, b = ((folder / name).read_bytes() for folder in (base, tree))
        for before, now in names.items():
            a = a.replace(before, now)
        if difference := _difference(Path(name).suffix, a, b, left_out):
            lines.append(f"{name}: {difference}")
    if not found["base"]:
        lines.append("BASE has left no file")
    return lines


def _files(folder: Path, results_only: bool) -> set[str]:
    names = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    names = {name for name in names if not any(fnmatch.fnmatch(name, pattern) for pattern in IGNORED)}
    if results_only:
        names = {name for name in names if any(fnmatch.fnmatch(name, pattern) for pattern in RESULTS)}
        names = {name for name in names if not name.startswith("out/checkpoints/")}
    return names


def _difference(suffix: str, a: bytes, b: bytes, left_out: re.Pattern[str]) -> str:
    if a == b:
        return ""
    if suffix == ".jsonl":
        rows = [[json.loads(line) for line in text.splitlines()] for text in (a, b)]
        if len(rows[0]) != len(rows[1]):
            return f"{len(rows[0])} rows in BASE, {len(rows[1])} in the working tree"
        for number, pair in enumerate(zip(*rows), 1):
            if where := _where(*pair, left_out):
                return f"row {number}{where}"
        return ""
    if suffix == ".json":
        return _where(json.loads(a), json.loads(b), left_out).lstrip()
    if suffix == ".safetensors":
        return _tensor(a, b)
    texts = (data.decode(errors="backslashreplace") for data in (a, b))
    lines = [[line for line in text.splitlines() if not left_out.search(line)] for text in texts]
    return "" if lines[0] == lines[1] else "contents differ"


def _where(a: object, b: object, left_out: re.Pattern[str], path: str = "") -> str:
    """Path of the first difference that is no clock reading, with both values."""
    if isinstance(a, dict) and isinstance(b, dict):
        for key in [*a, *(key for key in b if key not in a)]:
            if left_out.search(key):
                continue
            if key not in a or key not in b:
                return f"{path} {key}: only in {'BASE' if key in a else 'the working tree'}"
            if where := _where(a[key], b[key], left_out, f"{path} {key}"):
                return where
        return ""
    if isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        found = (_where(*pair, left_out, f"{path}[{place}]") for place, pair in enumerate(zip(a, b)))
        return next(filter(None, found), "")
    return "" if a == b else f"{path}: {str(a)[:60]} in BASE, {str(b)[:60]} in the working tree"


def _tensor(a: bytes, b: bytes) -> str:
    headers = [json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")]) for data in (a, b)]
    starts = [8 + int.from_bytes(data[:8], "little") for data in (a, b)]
    for name in [*headers[0], *(name for name in headers[1] if name not in headers[0])]:
        if name == "__metadata__":
            continue
        if name not in headers[0] or name not in headers[1]:
            return f"tensor {name}: only in {'BASE' if name in headers[0] else 'the working tree'}"
        one, other = headers[0][name], headers[1][name]
        if (one["dtype"], one["shape"]) != (other["dtype"], other["shape"]):
            return f"tensor {name}: {one['dtype']} {one['shape']} in BASE, {other['dtype']} {other['shape']} now"
        contents = [
            data[start + entry["data_offsets"][0] : start + entry["data_offsets"][1]]
            for data, start, entry in zip((a, b), starts, (one, other))
        ]
        if contents[0] != contents[1]:
            return f"tensor {name} differs"
    return ""


def ledger_problem(out: Path, bound: int) -> str:
    """Empty if the run's ledger settles every group once, and none was older than its bound."""
    lines = [json.loads(line) for line in (out / "ledger.jsonl").read_text().splitlines()]
    settled = sorted(
        place for line in lines for key in ("trained", "filtered", "failed") for place in line.get(key, [])
    )
    if settled != list(range(len(settled))):
        return f"groups {settled} were settled, each of them should be once"
    ages = [line["iteration"] - 1 - version for line in lines for version in line["versions"]]
    return "" if max(ages) <= bound else f"a group was {max(ages)} updates old, {bound} are allowed"
