"""Supervised fine-tuning: `trimtab sft`, or `python -m trimtab.cli.train_sft`."""

from collections.abc import Sequence

from trimtab.cli.training import training_main
from trimtab.config.jobs import SFTOptions


def main(argv: Sequence[str] | None = None) -> int:
    return training_main(SFTOptions, argv)


if __name__ == "__main__":
    raise SystemExit(main())
