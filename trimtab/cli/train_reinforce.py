"""REINFORCE++: `trimtab reinforce`, or `python -m trimtab.cli.train_reinforce`."""

from trimtab.cli.training import main_of

main = main_of("reinforce")

if __name__ == "__main__":
    raise SystemExit(main())
