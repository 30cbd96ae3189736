"""The module name under which OpenRLHF's documents start RL of every kind: `python -m trimtab.cli.train_ppo_ray`."""

from trimtab.cli.train_ppo import main

if __name__ == "__main__":
    raise SystemExit(main())
