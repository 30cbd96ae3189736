"""GRPO with DAPO's settings: `trimtab dapo`, or `python -m trimtab.cli.train_dapo`."""

from collections.abc import Sequence

from trimtab.cli.training import training_main
from trimtab.config.jobs import DAPOOptions


def main(argv: Sequence[str] | None = None) -> int:
    return training_main(DAPOOptions, argv)


if __name__ == "__main__":
    raise SystemExit(main())
