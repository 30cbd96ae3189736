"""REINFORCE++: `trimtab reinforce`, or `python -m trimtab.cli.train_reinforce`."""

from trimtab.cli.main import job_main

main = job_main("reinforce")

if __name__ == "__main__":
    raise SystemExit(main())
