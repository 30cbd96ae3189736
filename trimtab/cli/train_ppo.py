"""Proximal policy optimisation: `trimtab ppo`, or `python -m trimtab.cli.train_ppo`."""

from collections.abc import Sequence

from trimtab.cli.training import training_main
from trimtab.config.jobs import PPOOptions


def main(argv: Sequence[str] | None = None) -> int:
    return training_main(PPOOptions, argv)


if __name__ == "__main__":
    raise SystemExit(main())
