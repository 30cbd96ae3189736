"""Reward models: `trimtab rm`, or `python -m trimtab.cli.train_rm`."""

from collections.abc import Sequence

from trimtab.cli.training import training_main
from trimtab.config.jobs import RMOptions


def main(argv: Sequence[str] | None = None) -> int:
    return training_main(RMOptions, argv)


if __name__ == "__main__":
    raise SystemExit(main())
