"""Preference optimisation (DPO, IPO, cDPO, ORPO, SimPO): `trimtab dpo`, or `python -m trimtab.cli.train_dpo`."""

from collections.abc import Sequence

from trimtab.cli.training import training_main
from trimtab.config.jobs import DPOOptions


def main(argv: Sequence[str] | None = None) -> int:
    return training_main(DPOOptions, argv)


if __name__ == "__main__":
    raise SystemExit(main())
