"""Supervised fine-tuning: `trimtab sft`, or `python -m trimtab.cli.train_sft`."""

from trimtab.cli.main import job_main

main = job_main("sft")

if __name__ == "__main__":
    raise SystemExit(main())
