"""Rare bad answers made rarer: `trimtab tail`, or `python -m trimtab.cli.train_tail`."""

from trimtab.cli.main import job_main

main = job_main("tail")

if __name__ == "__main__":
    raise SystemExit(main())
