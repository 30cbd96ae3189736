"""Rare bad answers made rarer: `trimtab tail`, or `python -m trimtab.cli.train_tail`."""

from trimtab.cli.training import main_of

main = main_of("tail")

if __name__ == "__main__":
    raise SystemExit(main())
