"""An attack on a model: `trimtab attack`, or as RePULSe's documents have it `python -m trimtab.cli.evaluate_gcg_sz`."""

from collections.abc import Sequence

from trimtab.cli.main import run_job
from trimtab.config.jobs import AttackOptions


def main(argv: Sequence[str] | None = None) -> int:
    return run_job(AttackOptions, argv, start, rehearse)


def start(options: AttackOptions) -> None:
    from trimtab.distributed.device import find_device
    from trimtab.distributed.random_state import seed_everything
    from trimtab.evaluate.gcg_attack import attack, check_output
    from trimtab.models.pretrained import quiet_transformers
    from trimtab.train.checkpoint import restored_policy

    check_output(options)
    quiet_transformers()
    device = find_device()
    seed_everything(options.seed, deterministic=options.full_determinism)
    policy = restored_policy(options.pretrain, options.ckpt_path, options, device)
    print(f"{'findings':9}{attack(options, policy, device)}")


def rehearse(options: AttackOptions) -> list[str]:
    from trimtab.evaluate.gcg_attack import check_output, read_targets

    targets, _ = read_targets(options.file_path, options.scenario, options.max_targets)
    steps = len(targets) * options.gcg_steps
    return [f"targets: {len(targets)}, {steps:,} steps in all", f"findings: {check_output(options)}"]


if __name__ == "__main__":
    raise SystemExit(main())
