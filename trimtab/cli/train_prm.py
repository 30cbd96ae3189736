"""Process reward models: `trimtab prm`, or `python -m trimtab.cli.train_prm`."""

from collections.abc import Sequence

from trimtab.cli.training import training_main
from trimtab.config.jobs import PRMOptions


def main(argv: Sequence[str] | None = None) -> int:
    return training_main(PRMOptions, argv)


if __name__ == "__main__":
    raise SystemExit(main())
