"""Reward models: `trimtab rm`, or `python -m trimtab.cli.train_rm`."""

from trimtab.cli.training import main_of

main = main_of("rm")

if __name__ == "__main__":
    raise SystemExit(main())
