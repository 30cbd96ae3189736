"""REINFORCE leave-one-out: `trimtab rloo`, or `python -m trimtab.cli.train_rloo`."""

from collections.abc import Sequence

from trimtab.cli.training import training_main
from trimtab.config.jobs import RLOOOptions


def main(argv: Sequence[str] | None = None) -> int:
    return training_main(RLOOOptions, argv)


if __name__ == "__main__":
    raise SystemExit(main())
