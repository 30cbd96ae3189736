"""Rare bad answers made rarer: `trimtab tail`, or `python -m trimtab.cli.train_tail`."""

from collections.abc import Sequence

from trimtab.cli.training import training_main
from trimtab.config.jobs import TailOptions


def main(argv: Sequence[str] | None = None) -> int:
    return training_main(TailOptions, argv)


if __name__ == "__main__":
    raise SystemExit(main())
