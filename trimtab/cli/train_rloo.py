"""REINFORCE leave-one-out: `trimtab rloo`, or `python -m trimtab.cli.train_rloo`."""

from trimtab.cli.main import job_main

main = job_main("rloo")

if __name__ == "__main__":
    raise SystemExit(main())
