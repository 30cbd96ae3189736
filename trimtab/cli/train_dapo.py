"""GRPO with DAPO's settings: `trimtab dapo`, or `python -m trimtab.cli.train_dapo`."""

from trimtab.cli.main import job_main

main = job_main("dapo")

if __name__ == "__main__":
    raise SystemExit(main())
