"""RL as a config file says: `trimtab rl`, or `python -m trimtab.cli.train_rl`."""

from trimtab.cli.main import job_main

main = job_main("rl")

if __name__ == "__main__":
    raise SystemExit(main())
