"""Group relative policy optimisation: `trimtab grpo`, or `python -m trimtab.cli.train_grpo`."""

from trimtab.cli.training import main_of

main = main_of("grpo")

if __name__ == "__main__":
    raise SystemExit(main())
