"""Kahneman-Tversky optimisation: `trimtab kto`, or `python -m trimtab.cli.train_kto`."""

from trimtab.cli.main import job_main

main = job_main("kto")

if __name__ == "__main__":
    raise SystemExit(main())
