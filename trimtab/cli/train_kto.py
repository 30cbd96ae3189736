"""Kahneman-Tversky optimisation: `trimtab kto`, or `python -m trimtab.cli.train_kto`."""

from collections.abc import Sequence

from trimtab.cli.training import training_main
from trimtab.config.jobs import KTOOptions


def main(argv: Sequence[str] | None = None) -> int:
    return training_main(KTOOptions, argv)


if __name__ == "__main__":
    raise SystemExit(main())
