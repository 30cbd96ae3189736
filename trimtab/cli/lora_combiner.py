"""A LoRA adapter merged into its model: `trimtab lora-combine`, or `python -m trimtab.cli.lora_combiner`."""

from collections.abc import Sequence
from pathlib import Path

from trimtab.cli.main import run_job
from trimtab.config.jobs import LoraCombineOptions


def main(argv: Sequence[str] | None = None) -> int:
    return run_job(LoraCombineOptions, argv, combine)


def combine(options: LoraCombineOptions) -> None:
    from trimtab.models.save import merge_adapter

    merge_adapter(options.model_path, options.lora_path, options.output_path, is_rm=options.is_rm, bf16=options.bf16)
    print(f"{'model':9}{Path(options.output_path)}/")


if __name__ == "__main__":
    raise SystemExit(main())
