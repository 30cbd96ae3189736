"""Supervised fine-tuning: `trimtab sft`, or `python -m trimtab.cli.train_sft`."""

from trimtab.cli.training import main_of

main = main_of("sft")

if __name__ == "__main__":
    raise SystemExit(main())
