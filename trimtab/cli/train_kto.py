"""Kahneman-Tversky optimisation: `trimtab kto`, or `python -m trimtab.cli.train_kto`."""

from trimtab.cli.training import main_of

main = main_of("kto")

if __name__ == "__main__":
    raise SystemExit(main())
