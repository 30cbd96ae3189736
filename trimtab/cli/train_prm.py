"""Process reward models: `trimtab prm`, or `python -m trimtab.cli.train_prm`."""

from trimtab.cli.main import job_main

main = job_main("prm")

if __name__ == "__main__":
    raise SystemExit(main())
