"""RePULSe's frontier where nothing is noise: P(bad) against reward and against KL, exact, on the toy of bad words.

    python examples/claims/frontier.py run   --out frontier               every cell of the grid that is not there yet
    python examples/claims/frontier.py table --out frontier               P(bad) at matched reward and at matched KL
    python examples/claims/frontier.py draw  --out frontier               frontier/frontier.png

The claim is about a trade-off, so every method is trained with several weights of the KL, and methods are compared
where they have the same mean reward, or the same KL, on the line through their own points. All methods sample equally
many answers: what RePULSe's proposal says counts. `--answers 75000 750000` are the two budgets; `--variants` adds
other settings of the methods that push down, at the budgets given. Reward, KL, P(bad) and CVaR of a trained model are
sums over everything that it may say (toy_world.py). Left out: any choice of a setting by what is reported. The weights
were set by the exact optimum, and tried with seed 11.
"""

import argparse
import dataclasses
import shutil
import sys
from pathlib import Path

import grid

GROUP = 250  # answers of an update
WEIGHTS = (1.0, 0.3, 0.1, 0.03, 0.01)
PUSH = ("--push_down_scale", "per_group", "--target_dist_beta")
METHODS = {
    "REINFORCE": ("reinforce",),
    "RePULSe": ("repulse", "--alpha", "0.02", *PUSH, "-10"),
    "base proposal": ("base_proposal", "--alpha", "0.02", *PUSH, "-10"),
    "reward transform": ("reinforce_transform", "--alpha", "1", "--target_dist_beta", "-1"),
    "PPO": ("ppo", "--critic_learning_rate", "1e-3"),
}
VARIANTS = {
    "RePULSe, beta -3": ("repulse", "--alpha", "0.02", *PUSH, "-3"),
    "RePULSe, beta -30": ("repulse", "--alpha", "0.02", *PUSH, "-30"),
    "RePULSe, kappa 0.004": ("repulse", "--alpha", "0.004", *PUSH, "-10"),
    "RePULSe, kappa 0.1": ("repulse", "--alpha", "0.1", *PUSH, "-10"),
    "RePULSe, 2 proposal updates": ("repulse", "--alpha", "0.02", *PUSH, "-10", "--proposal_updates", "2"),
    "RePULSe, 5 proposal updates": ("repulse", "--alpha", "0.02", *PUSH, "-10", "--proposal_updates", "5"),
    "RePULSe, kappa 0.002 to 0.1": ("repulse", "--start_alpha", "0.002", "--alpha", "0.1", *PUSH, "-10"),
    "RePULSe, kappa 0.1 to 0.002": ("repulse", "--start_alpha", "0.1", "--alpha", "0.002", *PUSH, "-10"),
    "RePULSe, beta -1 to -10": ("repulse", "--alpha", "0.02", "--start_target_dist_beta", "-1", *PUSH, "-10"),
    "base proposal, kappa 0.1": ("base_proposal", "--alpha", "0.1", *PUSH, "-10"),
    "base proposal, beta -3": ("base_proposal", "--alpha", "0.02", *PUSH, "-3"),
    "reward transform, alpha 10": ("reinforce_transform", "--alpha", "10", "--target_dist_beta", "-1"),
}
SETTINGS = METHODS | VARIANTS
PARTS = 5  # a training is measured after each part of it


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("run", "table", "draw", "cell"), help="cell: one method, in this process")
    parser.add_argument("--out", type=Path, default=Path("frontier"), help="folder of everything")
    parser.add_argument("--methods", nargs="+", choices=SETTINGS, default=list(METHODS), metavar="METHOD")
    parser.add_argument("--variants", action="store_true", help="other settings of the methods as well")
    parser.add_argument("--weights", nargs="+", type=float, default=WEIGHTS, help="of the KL")
    parser.add_argument("--answers", nargs="+", type=int, default=[75_000], help="sampled in a training")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--group", type=int, default=GROUP, help="answers of an update")
    parser.add_argument("--at_once", type=int, default=1, help="trainings at the same time")
    parser.add_argument("--limit", type=float, default=3600, help="seconds, after which nothing is begun")
    options = parser.parse_args(argv)
    if options.what == "cell":
        for weight in options.weights:
            train(options, options.methods[0], weight, options.answers[0], options.seeds[0])
        return 0
    if options.what == "run":
        return 1 if run(options) else 0
    import frontier_views

    rows = [row for row in grid.read(options.out / "results.jsonl") if "reward" in row]
    if not rows:
        parser.error(f"{options.out}/results.jsonl: holds no result yet; frontier.py run makes them")
    views = {"table": frontier_views.table, "draw": frontier_views.draw}
    views[options.what](rows, options.out)
    return 0


def run(options: argparse.Namespace) -> list[str]:
    task = options.out / "task"
    if not task.exists():
        from trimtab.embedded import bad_word_task

        bad_word_task.write(task)
    methods = [*options.methods, *(VARIANTS if options.variants else ())]
    # Cheap budgets first, then a whole comparison with one seed before the next seed.
    cells = [
        (answers, seed, method) for answers in sorted(options.answers) for seed in options.seeds for method in methods
    ]
    found = {
        (row["answers"], row["seed"], row["method"], row["kl_weight"])
        for row in grid.read(options.out / "results.jsonl")
        if "reward" in row
    }
    jobs = []
    for cell in cells:
        jobs += jobs_of(options, [weight for weight in options.weights if (*cell, weight) not in found], *cell)
    return grid.run(jobs, options.out, at_once=options.at_once, limit=options.limit)


def jobs_of(options: argparse.Namespace, missing: list[float], answers: int, seed: int, method: str) -> list[grid.Job]:
    """Short trainings in one process, since starting it takes as long; apart where there is room for several."""
    together = [missing] if answers <= 100_000 and options.at_once == 1 else [[weight] for weight in missing]
    found = []
    for weights in filter(None, together):
        words = [*("--methods", method), *("--answers", answers), *("--seeds", seed), *("--weights", *weights)]
        words += ["--out", options.out, "--group", options.group]
        name = f"{named(method)}-{answers}-kl{'_'.join(f'{weight:g}' for weight in weights)}-s{seed}"
        command = [sys.executable, __file__, "cell", *map(str, words)]
        found.append(grid.Job(name, command, seconds=answers * len(weights) / 4000))
    return found


def named(method: str) -> str:
    return method.lower().replace(",", "").replace(" ", "_")


def train(options: argparse.Namespace, method: str, weight: float, answers: int, seed: int) -> None:
    """One training, and what came out of it."""
    from toy_world import World

    from trimtab.cli.train_tail import main as tail

    name, *settings = SETTINGS[method]
    updates_of_proposal = (
        int(settings[settings.index("--proposal_updates") + 1]) if "--proposal_updates" in settings else 1
    )
    drawn = options.group * (1 + updates_of_proposal if name == "repulse" else 1)  # answers of an update
    folder = options.out / "runs" / f"{named(method)}-{answers}-kl{weight:g}-s{seed}"
    shutil.rmtree(folder, ignore_errors=True)
    if name != "ppo":
        settings += ["--token_reduction", "token_sum"]  # else answers that end early follow another objective
    if name == "repulse":
        settings += ["--proposal_learning_rate", "6e-3"]
    task, group = options.out / "task", str(options.group)
    words = f"""
        --method {name} --seed {seed} --pretrain {task}/model --prompt_data {task}/prompts.jsonl --input_key prompt
        --remote_rm_url {task}/reward.py --bad_threshold 0 --single_prompt word7 --analytic_bad_word_calc
        --bad_token_ids 2 3 4 5 --generate_max_len 2 --rollout_batch_size 1 --n_samples_per_prompt {group}
        --train_batch_size {group} --micro_train_batch_size {group} --micro_rollout_batch_size {group}
        --actor_learning_rate 2e-3 --init_kl_coef {weight:g} --save_rollouts 0
        --fit_steps {PARTS} --num_episodes {max(1, answers // drawn // PARTS)}
        --save_path {folder} --ckpt_path {folder}/checkpoints
    """
    if code := tail([*words.split(), *settings]):
        raise SystemExit(code)
    world = World(task)
    outcome = world.outcome(world.log_probs(folder))
    grid.tell(
        method=method, kl_weight=weight, answers=answers, seed=seed, group=options.group,
        **dataclasses.asdict(outcome), **history(grid.read(folder / "metrics.jsonl")),
    )  # fmt: skip


def history(metrics: list[dict]) -> dict:
    """How it went: log P(bad) after each part, and how good the proposal was in the last part."""
    rows = [row for row in metrics if row["step"] > 0]
    last = rows[-max(1, len(rows) // PARTS) :]
    path = [row["log_bad_probability"] for row in metrics if "log_bad_probability" in row]
    found: dict = {"updates": len(rows), "log_bad_path": path}
    for name in ("effective_samples", "proposal_effective_samples", "proposal_bad_share", "proposal_reward"):
        if name in last[0]:
            found[name] = sum(row[name] for row in last) / len(last)
    if "proposal_bad_share" in rows[0]:
        # After how many updates half of what the proposal says is bad.
        found["proposal_found_after"] = next((r["step"] for r in rows if r["proposal_bad_share"] > 0.5), None)
    return found


if __name__ == "__main__":
    raise SystemExit(main())
