"""RL as a config file says: `trimtab rl`, or `python -m trimtab.cli.train_rl`."""

from collections.abc import Sequence

from trimtab.cli.training import training_main
from trimtab.config.jobs import AnyRLOptions


def main(argv: Sequence[str] | None = None) -> int:
    return training_main(AnyRLOptions, argv)


if __name__ == "__main__":
    raise SystemExit(main())
