"""Answers to many prompts, or scores of answers: `trimtab generate`, or `python -m trimtab.cli.batch_inference`."""

import sys
from collections.abc import Sequence

from trimtab.cli.run import run_job
from trimtab.config.jobs import GenerateOptions
from trimtab.output import steady_output
from trimtab.running.generation import rehearse_generating, start_generating


def main(argv: Sequence[str] | None = None) -> int:
    words = sys.argv[1:] if argv is None else list(argv)

    def start(options: GenerateOptions) -> int:
        return start_generating(options, "trimtab.cli.batch_inference", words)

    with steady_output():
        return run_job(GenerateOptions, argv, start, rehearse_generating)


if __name__ == "__main__":
    raise SystemExit(main())
