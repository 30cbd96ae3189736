"""Preference optimisation (DPO, IPO, cDPO, ORPO, SimPO): `trimtab dpo`, or `python -m trimtab.cli.train_dpo`."""

from trimtab.cli.main import job_main

main = job_main("dpo")

if __name__ == "__main__":
    raise SystemExit(main())
