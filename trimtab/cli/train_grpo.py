"""Group relative policy optimisation: `trimtab grpo`, or `python -m trimtab.cli.train_grpo`."""

from trimtab.cli.main import job_main

main = job_main("grpo")

if __name__ == "__main__":
    raise SystemExit(main())
