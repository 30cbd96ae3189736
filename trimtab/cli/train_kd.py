"""Distillation: `trimtab kd`, or `python -m trimtab.cli.train_kd`."""

from trimtab.cli.main import job_main

main = job_main("kd")

if __name__ == "__main__":
    raise SystemExit(main())
