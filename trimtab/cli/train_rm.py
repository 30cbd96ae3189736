"""Reward models: `trimtab rm`, or `python -m trimtab.cli.train_rm`."""

from trimtab.cli.main import job_main

main = job_main("rm")

if __name__ == "__main__":
    raise SystemExit(main())
