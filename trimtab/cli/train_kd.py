"""Distillation: `trimtab kd`, or `python -m trimtab.cli.train_kd`."""

from trimtab.cli.training import main_of

main = main_of("kd")

if __name__ == "__main__":
    raise SystemExit(main())
