"""RL as a config file says: `trimtab rl`, or `python -m trimtab.cli.train_rl`."""

from trimtab.cli.training import main_of

main = main_of("rl")

if __name__ == "__main__":
    raise SystemExit(main())
