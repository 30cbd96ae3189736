"""Process reward models: `trimtab prm`, or `python -m trimtab.cli.train_prm`."""

from trimtab.cli.training import main_of

main = main_of("prm")

if __name__ == "__main__":
    raise SystemExit(main())
