"""REINFORCE++: `trimtab reinforce`, or `python -m trimtab.cli.train_reinforce`."""

from collections.abc import Sequence

from trimtab.cli.training import training_main
from trimtab.config.jobs import ReinforceOptions


def main(argv: Sequence[str] | None = None) -> int:
    return training_main(ReinforceOptions, argv)


if __name__ == "__main__":
    raise SystemExit(main())
