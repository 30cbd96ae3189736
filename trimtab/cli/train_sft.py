"""Supervised fine-tuning: `trimtab sft`, or `python -m trimtab.cli.train_sft`."""

from collections.abc import Sequence

from trimtab.cli.run import run_job
from trimtab.config.jobs import SFTOptions


def main(argv: Sequence[str] | None = None) -> int:
    return run_job(SFTOptions, argv, start, rehearse)


def start(options: SFTOptions) -> None:
    from trimtab.train.sft import train_sft

    train_sft(options)


def rehearse(options: SFTOptions) -> list[str]:
    from trimtab.train.sft import rehearse_sft

    return rehearse_sft(options)


if __name__ == "__main__":
    raise SystemExit(main())
