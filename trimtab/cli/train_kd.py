"""Distillation: `trimtab kd`, or `python -m trimtab.cli.train_kd`."""

from collections.abc import Sequence

from trimtab.cli.training import training_main
from trimtab.config.jobs import KDOptions


def main(argv: Sequence[str] | None = None) -> int:
    return training_main(KDOptions, argv)


if __name__ == "__main__":
    raise SystemExit(main())
