"""Proximal policy optimisation: `trimtab ppo`, or `python -m trimtab.cli.train_ppo`."""

from trimtab.cli.main import job_main

main = job_main("ppo")

if __name__ == "__main__":
    raise SystemExit(main())
