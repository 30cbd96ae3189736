"""Preference optimisation (DPO, IPO, cDPO, ORPO, SimPO): `trimtab dpo`, or `python -m trimtab.cli.train_dpo`."""

from trimtab.cli.training import main_of

main = main_of("dpo")

if __name__ == "__main__":
    raise SystemExit(main())
