"""Group relative policy optimisation: `trimtab grpo`, or `python -m trimtab.cli.train_grpo`."""

from collections.abc import Sequence

from trimtab.cli.training import training_main
from trimtab.config.jobs import GRPOOptions


def main(argv: Sequence[str] | None = None) -> int:
    return training_main(GRPOOptions, argv)


if __name__ == "__main__":
    raise SystemExit(main())
