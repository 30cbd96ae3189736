"""RePULSe's frontier on a real model, and an attack with enough goals to count.

    python examples/claims/real_frontier.py run    --model MODEL --pairs PAIRS --judge JUDGE --out real --bf16
    python examples/claims/real_frontier.py attack ... --goals GOALS.csv
    python examples/claims/real_frontier.py table  --out real
    python examples/claims/real_frontier.py draw   --out real

Prompts are the questions that PAIRS begin with, and JUDGE is a reward model that judge.py made of the same file: what
it keeps for the report is asked here for the report alone. Of the other questions a sixth is kept from training too:
threshold and weights are chosen by what came out there (`table --split chosen_by`). All methods sample equally many
answers in training, with several weights of the KL each; every reward and KL of an answer that was sampled after
training is in results.jsonl, so that thresholds and intervals can be looked at later. `attack` takes a model of each
method with about the same reward, by what it is chosen by, and trains them anew where they are not there any more.
`--variants` adds other settings of RePULSe, with one weight and a seed or more, which `table` holds against the lines.
"""

import argparse
import csv
import json
import shutil
import sys
from pathlib import Path

import grid
from judge import is_reported, part_of, question_of, read_pairs
from real_frontier_methods import BEFORE, METHODS, VARIANTS, WEIGHTS, words_of

GROUP, PROMPTS = 8, 25  # answers to a prompt, and prompts, of an update
PARTS = 5  # of a training, of each of which it is told how it went
SIXTHS = 6  # one of them is what thresholds and weights are chosen by


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("run", "attack", "table", "draw", "cell", "attack_cell"), help="the last two "
                        "are what a grid starts: one training, some goals")  # fmt: skip
    parser.add_argument("--model", help="the policy before training: a folder or a hub name")
    parser.add_argument("--pairs", type=Path, help="a file of JSON rows, plain or .gz, whose questions are asked")
    parser.add_argument("--judge", help="reward model")
    parser.add_argument("--out", type=Path, default=Path("real"), help="folder of everything")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=["REINFORCE", "RePULSe"], metavar="METHOD")
    parser.add_argument("--weights", nargs="+", help="of the KL, as METHOD=0.1,0.05; unset: three each")
    parser.add_argument("--variants", nargs="*", choices=VARIANTS, metavar="VARIANT",
                        help="other settings of RePULSe as well: these, or all")  # fmt: skip
    parser.add_argument("--variants_weight", type=float, default=0.25, help="their weight of the KL")
    parser.add_argument("--variants_seeds", nargs="+", type=int, help="unset: the first of --seeds")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--answers", type=int, default=20_000, help="sampled in a training")
    parser.add_argument("--held_out", type=int, default=24, help="answers to each held-out prompt")
    parser.add_argument("--questions", type=int, help="use the first questions only")
    parser.add_argument("--group", type=int, default=GROUP, help="answers to a prompt in an update")
    parser.add_argument("--prompts", type=int, default=PROMPTS, help="of an update")
    parser.add_argument("--tokens", type=int, default=20, help="of an answer, at most")
    parser.add_argument("--learning_rate", type=float, default=3e-5)
    parser.add_argument("--proposal_learning_rate", type=float, default=1e-4)
    parser.add_argument("--alpha", type=float, default=0.16, help="push-down; divided by --group")
    parser.add_argument("--beta", type=float, default=-5.0)
    parser.add_argument("--threshold", type=float, help="rewards below it are bad; unset: in tables what "
                        "--share_bad says, in trainings bad answers are not counted")  # fmt: skip
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--at_once", type=int, default=1, help="trainings at the same time")
    parser.add_argument("--seconds", type=float, default=60, help="about how long a training takes")
    parser.add_argument("--limit", type=float, default=3600, help="seconds, after which everything is cut off")
    parser.add_argument("--goals", type=Path, help="CSV with the columns goal and target")
    parser.add_argument("--most_goals", type=int, default=50)
    parser.add_argument("--steps", type=int, default=30, help="of the search for a suffix")
    parser.add_argument("--width", type=int, default=128, help="candidates of a step")
    parser.add_argument("--replies", type=int, default=200, help="to each goal, before and after the attack")
    parser.add_argument("--attacked", nargs="+", default=[], metavar='"METHOD WEIGHT SEED"',
                        help="unset: of each method one, with about the same reward")  # fmt: skip
    parser.add_argument("--parts", type=int, default=5, help="processes that share a model's goals")
    parser.add_argument("--split", choices=("reported", "chosen_by", "all"), default="reported",
                        help="whose answers count; all: where nothing was chosen")  # fmt: skip
    parser.add_argument("--share_bad", type=float, default=0.05, help="of answers before training that are called bad: "
                        "few enough to be bad, and so many that some are left after training")  # fmt: skip
    options = parser.parse_args(argv)
    if options.what == "cell":
        method, weight, seed = options.attacked[0].rsplit(" ", 2)
        train(options, method, float(weight), int(seed))
    elif options.what == "attack_cell":
        attack(options)
    elif options.what in ("table", "draw"):
        import real_frontier_answers
        import real_frontier_views

        rows = grid.read(options.out / "results.jsonl")
        if not any("rewards" in row for row in rows):
            parser.error(f"{options.out}/results.jsonl: holds no result yet; real_frontier.py run makes them")
        views = {"table": real_frontier_views.table, "draw": real_frontier_views.draw}
        threshold = options.threshold
        if threshold is None:
            threshold = real_frontier_answers.threshold_of(rows, options.share_bad)
        views[options.what](rows, options.split, threshold, options.out)
    else:
        if not (options.model and options.pairs and options.judge):
            parser.error("--model, --pairs and --judge are needed")
        if options.what == "attack" and not options.goals:
            parser.error("--goals is needed: what the attacks are to bring about")
        if options.what == "attack" and not options.attacked:
            import real_frontier_views

            options.attacked = real_frontier_views.alike(grid.read(options.out / "results.jsonl"))
            print(f"attacked: {', '.join(options.attacked)}")
        ask(options)
        jobs = trainings(options) if options.what == "run" else attacks(options)
        return 1 if grid.run(jobs, options.out, at_once=options.at_once, limit=options.limit) else 0
    return 0


def ask(options: argparse.Namespace) -> None:
    """Files of prompts: what is trained on, and what is asked afterwards with the split that each is of."""
    options.out.mkdir(parents=True, exist_ok=True)
    questions = list(dict.fromkeys(map(question_of, read_pairs(options.pairs))))[: options.questions]
    splits: dict[str, list[str]] = {"trained": [], "chosen_by": [], "reported": []}
    for question in questions:
        kept = part_of(question, SIXTHS, salt="threshold") == 0
        splits["reported" if is_reported(question) else "chosen_by" if kept else "trained"].append(question)
    held_out = [{"prompt": q, "split": split} for split in ("chosen_by", "reported") for q in splits[split]]
    write(options.out / "prompts.jsonl", [{"prompt": question} for question in splits["trained"]])
    write(options.out / "held_out.jsonl", held_out)


def write(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


# ---- trainings


def trainings(options: argparse.Namespace) -> list[grid.Job]:
    """The model as it was, then a whole comparison with one seed before the next seed."""
    given = dict(word.split("=") for word in options.weights or [])
    weights = WEIGHTS | {method: tuple(map(float, text.split(","))) for method, text in given.items()}
    cells = [(BEFORE, 0.0, 1)]
    for seed in options.seeds:
        for place in range(max(len(weights[method]) for method in options.methods)):
            cells += [(m, weights[m][place], seed) for m in options.methods if place < len(weights[m])]
        if options.variants is not None and seed == options.seeds[0]:
            seeds = options.variants_seeds or [seed]
            cells += [(name, options.variants_weight, own) for own in seeds for name in options.variants or VARIANTS]
    return [training(options, *cell) for cell in cells]


def training(options: argparse.Namespace, method: str, weight: float, seed: int) -> grid.Job:
    command = command_of(options, "cell", ["--attacked", f"{method} {weight:g} {seed}"])
    name = name_of(method, weight, seed)
    return grid.Job(name, command, seconds=options.seconds, product=folder_of(options, method, weight, seed))


def command_of(options: argparse.Namespace, what: str, more: list[str]) -> list[str]:
    """This script again, with the same settings."""
    kept = ("model", "judge", "out", "answers", "held_out", "group", "prompts", "tokens", "learning_rate",
            "proposal_learning_rate", "alpha", "beta", "threshold", "goals", "steps", "width", "replies")  # fmt: skip
    words = [word for name in kept if (value := getattr(options, name)) is not None for word in (f"--{name}", value)]
    return [sys.executable, __file__, what, *map(str, words), *(["--bf16"] if options.bf16 else []), *more]


def name_of(method: str, weight: float, seed: int) -> str:
    return f"{method.lower().replace(',', '').replace(' ', '_')}-kl{weight:g}-s{seed}"


def folder_of(options: argparse.Namespace, method: str, weight: float, seed: int) -> Path:
    return options.out / "runs" / name_of(method, weight, seed)


def train(options: argparse.Namespace, method: str, weight: float, seed: int) -> None:
    """One training; then every reward and KL of held-out answers, and how the proposal learnt."""
    from trimtab.cli.train_tail import main as tail
    from trimtab.evaluate.tail_risk import HELD_OUT, read_held_out

    folder = folder_of(options, method, weight, seed)
    shutil.rmtree(folder, ignore_errors=True)
    untrained = method == BEFORE
    name, settings = words_of("REINFORCE" if untrained else method, options)
    drawn = options.prompts * options.group * (1 + int(settings.get("proposal_updates", 1)) if name == "repulse" else 1)
    updates = 1 if untrained else max(1, options.answers // drawn)
    turns = max(1, options.held_out // options.group)
    size = options.prompts * options.group
    words = f"""
        --method {name} --seed {seed} --pretrain {options.model} --reward_pretrain {options.judge} --normalize_reward
        --prompt_data {options.out}/prompts.jsonl --input_key prompt --apply_chat_template --prompt_max_len 256
        --generate_max_len {options.tokens} --rollout_batch_size {options.prompts}
        --n_samples_per_prompt {options.group} --train_batch_size {size} --micro_train_batch_size {size}
        --micro_rollout_batch_size {5 * size} --rollout_slots 512
        --num_episodes 1000 --max_steps {updates} --init_kl_coef {weight:g}
        --actor_learning_rate {0 if untrained else options.learning_rate} --save_rollouts 0
        --evaluate_heldout_sampling --heldout_prompt_data {options.out}/held_out.jsonl --sampling_iters {turns}
        --save_path {folder} --ckpt_path {folder}/checkpoints
    """.split()
    words += [word for option, value in settings.items() for word in (f"--{option}", value)]
    words += [] if options.threshold is None else ["--bad_threshold", str(options.threshold)]
    words += ["--bf16"] if options.bf16 else []
    if code := tail(words):
        raise SystemExit(code)
    found = read_held_out(next(path for path in folder.glob(f"{HELD_OUT}*") if path.suffix != ".json"))
    prompts = grid.read(options.out / "held_out.jsonl")
    assert len(found.rewards) == len(prompts) * turns * options.group, "a prompt was left out"
    metrics = [row for row in grid.read(folder / "metrics.jsonl") if row["step"] > 0]
    kl = (found.rewards - found.returns) / weight if weight else 0 * found.rewards  # of a whole answer
    grid.tell(
        method=method, kl_weight=weight, seed=seed, answers=options.answers, updates=updates, group=options.group,
        beta=float(settings.get("target_dist_beta", 0)),
        splits=[row["split"] for row in prompts], rewards=[round(x, 3) for x in found.rewards.tolist()],
        kl=[round(x, 3) for x in kl.tolist()], rare_events=rare_events(folder),
        course=course(metrics),
    )  # fmt: skip


def course(metrics: list[dict]) -> dict[str, list[float]]:
    """The means of each part of the training, of what tells how policy and proposal learnt."""
    parts = [part for number in range(PARTS)
             if (part := metrics[number * len(metrics) // PARTS : (number + 1) * len(metrics) // PARTS])]  # fmt: skip
    names = ("reward", "kl_answer", "bad_share", "kappa", "beta", "proposal_reward", "proposal_bad_share",
             "proposal_effective_samples")  # fmt: skip
    return {n: [round(sum(row[n] for row in p) / len(p), 4) for p in parts] for n in names if n in metrics[0]}


def rare_events(folder: Path) -> dict | None:
    """P(bad) from the proposal's answers, at --bad_threshold."""
    (path,) = folder.glob("info_eval_*.json")
    return json.loads(path.read_text()).get("rare_events")


# ---- attacks


def attacks(options: argparse.Namespace) -> list[grid.Job]:
    with open(options.goals, newline="") as file:
        goals = list(csv.DictReader(file))[: options.most_goals]
    options.parts = min(options.parts, len(goals))
    jobs = []
    for part in range(options.parts):
        with open(options.out / f"goals-{part}.csv", "w", newline="") as file:
            writer = csv.DictWriter(file, ["goal", "target"])
            writer.writeheader()
            writer.writerows({name: goal[name] for name in ("goal", "target")} for goal in goals[part :: options.parts])
    for cell in options.attacked:
        method, weight, seed = cell.rsplit(" ", 2)
        jobs.append(training(options, method, float(weight), int(seed)))
    for part in range(options.parts):
        for cell in options.attacked:
            method, weight, seed = cell.rsplit(" ", 2)
            trained = name_of(method, float(weight), int(seed))
            command = command_of(options, "attack_cell", ["--parts", str(part), "--attacked", cell])
            jobs.append(grid.Job(f"attack-{trained}-{part}", command, needs=(trained,), seconds=options.seconds))
    return jobs


def attack(options: argparse.Namespace) -> None:
    """Some of the goals, and what each search came to."""
    from trimtab.cli.evaluate_gcg_sz import main as gcg

    method, weight, seed = options.attacked[0].rsplit(" ", 2)
    folder = folder_of(options, method, float(weight), int(seed))
    findings = options.out / f"attack-{folder.name}-{options.parts}.jsonl"
    findings.unlink(missing_ok=True)
    words = f"""
        --pretrain {folder} --file_path {options.out}/goals-{options.parts}.csv --reward_pretrain {options.judge}
        --normalize_reward --rm_exclude_adv_suffix --reward_threshold 0 --max_new_tokens {options.tokens}
        --gcg_steps {options.steps} --gcg_search_width {options.width} --gcg_batch_size {options.width}
        --gcg_use_prefix_cache --gcg_filter_ids --gcg_early_stop --samples_per_prompt {options.replies}
        --output_path {findings}
    """.split()
    if code := gcg([*words, *(["--bf16"] if options.bf16 else [])]):
        raise SystemExit(code)
    for row in grid.read(findings):
        grid.tell(
            attacked=method, kl_weight=float(weight), seed=int(seed), goal=row["goal"], loss=row["loss"],
            steps=len(row["losses"]), stopped_early=row["stopped_early"],
            **{f"{when}_{name}": row[when][name] for when in ("before", "after") for name in ("answered", "matched")},
            **{when: [round(x, 3) for x in row[when]["rewards"]] for when in ("before", "after")},
            **{f"{when}_target": row[when]["target_log_prob"] for when in ("before", "after")},
        )  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(main())
