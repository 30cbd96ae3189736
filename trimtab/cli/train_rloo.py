"""REINFORCE leave-one-out: `trimtab rloo`, or `python -m trimtab.cli.train_rloo`."""

from trimtab.cli.training import main_of

main = main_of("rloo")

if __name__ == "__main__":
    raise SystemExit(main())
