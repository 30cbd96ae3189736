"""GRPO with DAPO's settings: `trimtab dapo`, or `python -m trimtab.cli.train_dapo`."""

from trimtab.cli.training import main_of

main = main_of("dapo")

if __name__ == "__main__":
    raise SystemExit(main())
