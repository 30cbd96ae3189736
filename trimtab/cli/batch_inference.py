"""Answers to many prompts, or scores of answers: `trimtab generate`, or `python -m trimtab.cli.batch_inference`."""

import os
import sys
from collections.abc import Sequence

from trimtab.cli.run import run_job
from trimtab.config.jobs import GenerateOptions
from trimtab.distributed.launch import launch
from trimtab.distributed.watch import watch
from trimtab.output import steady_output


def main(argv: Sequence[str] | None = None) -> int:
    words = sys.argv[1:] if argv is None else list(argv)

    def start(options: GenerateOptions) -> int:
        if options.nproc > 1 and "WORLD_SIZE" not in os.environ:
            return launch("trimtab.cli.batch_inference", words, options.nproc, options.hang_timeout)
        watch(options.hang_timeout)
        work(options)
        return 0

    with steady_output():
        return run_job(GenerateOptions, argv, start, rehearse)


def work(options: GenerateOptions) -> None:
    if options.eval_task == "rm":
        from trimtab.evaluate.scoring import score

        score(options)
    else:
        from trimtab.evaluate.generation import generate

        generate(options)


def rehearse(options: GenerateOptions) -> list[str]:
    if options.eval_task == "rm":
        from trimtab.evaluate.scoring import rehearse_scoring

        return rehearse_scoring(options)
    from trimtab.evaluate.generation import rehearse_generation

    return rehearse_generation(options)


if __name__ == "__main__":
    raise SystemExit(main())
