"""A judge of harmlessness, as good as a small model and some pairs allow: settings compared, one chosen, then trained.

    python examples/claims/judge.py --model MODEL --pairs PAIRS --out judge              both stages
    python examples/claims/judge.py --out judge --table                                  what came out

PAIRS has rows with `chosen` and `rejected`, texts such as "Human: ... Assistant: ...", as in HH-RLHF. Its questions are
dealt out once: a fifth is for the report alone. On the rest every setting is cross-validated (trained on all folds but
one, measured on that one), the one with the most pairs in the right order is chosen, and with it judges of several
seeds are trained on the whole rest. `judge/judge-SEED` are reward models: give them to --reward_pretrain, one or,
separated by commas, all, whose rewards are then added up. Left out: a choice by what is reported.
"""

import argparse
import gzip
import hashlib
import json
import shutil
import sys
from pathlib import Path

import grid

SETTINGS = {
    "full, 1e-5, 2 epochs": ("--learning_rate", "1e-5", "--max_epochs", "2"),
    "full, 3e-5, 2 epochs": ("--learning_rate", "3e-5", "--max_epochs", "2"),
    "full, 3e-5, 4 epochs": ("--learning_rate", "3e-5", "--max_epochs", "4"),
    "full, 1e-4, 2 epochs": ("--learning_rate", "1e-4", "--max_epochs", "2"),
    "full, 3e-5, 3 epochs, decay 0.1": ("--learning_rate", "3e-5", "--max_epochs", "3", "--l2", "0.1"),
    "LoRA 16, 2e-4, 2 epochs": ("--lora_rank", "16", "--learning_rate", "2e-4", "--max_epochs", "2"),
    "LoRA 64, 5e-4, 3 epochs": ("--lora_rank", "64", "--learning_rate", "5e-4", "--max_epochs", "3"),
}
FIFTHS = 5  # one of them is for the report alone


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="what judges start from: a folder or a hub name")
    parser.add_argument("--pairs", type=Path, help="a file of JSON rows, plain or .gz")
    parser.add_argument("--out", type=Path, default=Path("judge"), help="folder of everything")
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS), metavar="SETTING")
    parser.add_argument("--folds", type=int, default=3)
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3], help="of the judges that are kept")
    parser.add_argument("--rows", type=int, help="use the first rows only")
    parser.add_argument("--more", nargs="*", default=[], help="more words for trimtab rm, such as bf16 max_len=1024")
    parser.add_argument("--at_once", type=int, default=1, help="trainings at the same time")
    parser.add_argument("--limit", type=float, default=3600, help="seconds for each of the two stages")
    parser.add_argument("--stages", nargs="+", choices=("folds", "judges"), default=["folds", "judges"])
    parser.add_argument("--table", action="store_true", help="train nothing")
    parser.add_argument("--cell", nargs=2, metavar=("NAME", "SETTING"), help="folds or report, in this process")
    options = parser.parse_args(argv)
    if options.cell:
        cell(options, *options.cell)
        return 0
    if not options.table:
        if not options.model or not options.pairs:
            parser.error("--model and --pairs are needed")
        deal(options)
        if "folds" in options.stages:
            work(options, [job(options, "folds", setting, options.seeds[0]) for setting in options.settings])
        setting = chosen(grid.read(options.out / "results.jsonl"))
        if setting is None:
            parser.error(f"{options.out}: no setting has been measured; look at the .log files there")
        if "judges" in options.stages:
            forget_lost_judges(options.out)
            work(options, [job(options, "report", setting, seed) for seed in options.seeds])
    table(grid.read(options.out / "results.jsonl"))
    return 0


# ---- data


def read_pairs(path: Path, most: int | None = None) -> list[dict]:
    content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    return [json.loads(line) for line in content.decode().split("\n") if line][:most]


def question_of(row: dict) -> str:
    """What a conversation begins with."""
    return row["chosen"].split("\n\nAssistant:")[0].replace("\n\nHuman:", "", 1).strip()


def part_of(question: str, parts: int, salt: str = "") -> int:
    """The same for the same question, in every run and on every machine."""
    return int(hashlib.sha256((salt + question).encode()).hexdigest(), 16) % parts


def is_reported(question: str) -> bool:
    """Whether it is of the fifth that nothing is chosen or trained by."""
    return part_of(question, FIFTHS) == 0


def deal(options: argparse.Namespace) -> None:
    """Files of pairs: of each fold what is trained on and what is measured, and the same for the report."""
    options.out.mkdir(parents=True, exist_ok=True)
    rows = read_pairs(options.pairs, options.rows)
    reported = [row for row in rows if is_reported(question_of(row))]
    rest = [row for row in rows if not is_reported(question_of(row))]
    fold = [part_of(question_of(row), options.folds, salt="fold") for row in rest]
    write(options.out / "report", rest, reported)
    for k in range(options.folds):
        write(options.out / f"fold-{k}", [r for r, f in zip(rest, fold) if f != k],
              [r for r, f in zip(rest, fold) if f == k])  # fmt: skip


def write(stem: Path, train: list[dict], measured: list[dict]) -> None:
    for name, rows in (("train", train), ("measured", measured)):
        Path(f"{stem}-{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


# ---- trainings


def work(options: argparse.Namespace, jobs: list[grid.Job]) -> None:
    grid.run(jobs, options.out, at_once=options.at_once, limit=options.limit)


def forget_lost_judges(out: Path) -> None:
    """What was made in another sitting and not kept is made again."""
    rows = grid.read(out / "results.jsonl")
    kept = [row for row in rows if row.get("stage") != "final" or (out / f"judge-{row['seed']}").exists()]
    (out / "results.jsonl").write_text("".join(json.dumps(row) + "\n" for row in kept))


def job(options: argparse.Namespace, data: str, setting: str, seed: int) -> grid.Job:
    words = ["--model", options.model, "--out", options.out, "--folds", options.folds, "--seeds", seed]
    words += ["--cell", data, setting, *(["--more", *options.more] if options.more else [])]
    return grid.Job(f"{data}-{seed}-{named(setting)}", [sys.executable, __file__, *map(str, words)], seconds=20)


def named(setting: str) -> str:
    return setting.lower().replace(",", "").replace(" ", "_")


def cell(options: argparse.Namespace, data: str, setting: str) -> None:
    """All folds in one process, since starting it takes as long as a training; or a judge for the report."""
    for name in [f"fold-{k}" for k in range(options.folds)] if data == "folds" else [data]:
        train(options, name, setting)


def train(options: argparse.Namespace, data: str, setting: str) -> None:
    """Train, and tell by how much the chosen answer of every measured pair is ahead."""
    from trimtab.cli.train_rm import main as rm

    seed = options.seeds[0]
    is_final = data == "report"
    folder = options.out / (f"judge-{seed}" if is_final else f"runs/{data}-{named(setting)}")
    shutil.rmtree(folder, ignore_errors=True)
    words = f"""
        --pretrain {options.model} --dataset {options.out}/{data}-train.jsonl --apply_chat_template
        --eval_dataset {options.out}/{data}-measured.jsonl --seed {seed} --save_path {folder}
        --train_batch_size 32 --micro_train_batch_size 16 --packing_samples --lr_warmup_ratio 0.1
    """.split()
    for word in options.more:
        name, _, value = word.partition("=")
        words += [f"--{name}", *([value] if value else [])]
    if "--max_len" not in words:
        words += ["--max_len", "1024"]  # all pairs of HH-RLHF's harmlessness, but for a few
    if code := rm([*words, *SETTINGS[setting]]):
        raise SystemExit(code)
    rewards = json.loads((folder / "rewards.json").read_text())
    if not is_final:
        shutil.rmtree(folder)  # many, and large; what they came to is known
    elif "--lora_rank" in SETTINGS[setting]:
        merge(options.model, folder)
    ahead = [round(chosen - rejected, 4) for chosen, rejected in rewards["chosen_rejected"]]
    grid.tell(stage="final" if is_final else "fold", data=data, setting=setting, seed=seed, ahead=ahead)


def merge(model: str, folder: Path) -> None:
    """A model in place of its adapter, since one such may be a judge everywhere."""
    from trimtab.cli.lora_combiner import main as combine

    adapter = folder.with_name(f"{folder.name}-adapter")
    shutil.rmtree(adapter, ignore_errors=True)
    folder.rename(adapter)
    if code := combine(
        [*("--model_path", model, "--lora_path", str(adapter), "--output_path", str(folder)), "--is_rm"]
    ):
        raise SystemExit(code)


# ---- what came out


def chosen(rows: list[dict]) -> str | None:
    """The setting with the most pairs in the right order over the folds that all settings have."""
    found = by_setting(rows)
    return max(found, key=lambda setting: accuracy(found[setting])) if found else None


def by_setting(rows: list[dict]) -> dict[str, list[float]]:
    """How far ahead the chosen answers are, in folds that all settings have."""
    folds: dict[str, dict[str, list[float]]] = {}
    for row in rows:
        if row.get("stage") == "fold":
            folds.setdefault(row["setting"], {})[row["data"]] = row["ahead"]
    shared = set.intersection(*(set(one) for one in folds.values())) if folds else set()
    if not shared:
        return {}
    return {setting: [x for name in sorted(shared) for x in found[name]] for setting, found in folds.items()}


def accuracy(ahead: list[float]) -> float:
    """Of pairs in the right order; one that is held equal counts by half."""
    return sum((x > 0) + (x == 0) / 2 for x in ahead) / len(ahead)


def table(rows: list[dict]) -> None:
    found = by_setting(rows)
    best = chosen(rows)
    print("| setting | pairs in the right order, cross-validated |\n|---|---|")
    for setting, ahead in sorted(found.items(), key=lambda item: -accuracy(item[1])):
        print(f"| {setting}{' (chosen)' if setting == best else ''} | {shown(ahead)} |")
    finals = {row["seed"]: row["ahead"] for row in rows if row.get("stage") == "final" and row["setting"] == best}
    if finals:
        print("\n| judge | pairs of the report in the right order |\n|---|---|")
        for seed, ahead in sorted(finals.items()):
            print(f"| seed {seed} | {shown(ahead)} |")
        together = [sum(column) for column in zip(*finals.values(), strict=True)]
        print(f"| all of them added up | {shown(together)} |")


def shown(ahead: list[float]) -> str:
    """With Wilson's 95 % interval: nearly every pair has a question of its own."""
    from trimtab.evaluate.tail_risk import share

    found = share(accuracy(ahead) * len(ahead), len(ahead))
    return f"{found.value:.1%} ({found.low:.1%} to {found.high:.1%}) of {len(ahead)}"


if __name__ == "__main__":
    raise SystemExit(main())
