"""Answers to many prompts, or scores of answers, from checked options."""

from collections.abc import Sequence

from trimtab.config.jobs import GenerateOptions
from trimtab.distributed.supervision import Hear, launch_processes, watch
from trimtab.running.preparing import launches_others


def start_generating(options: GenerateOptions, module: str, words: Sequence[str], hear: Hear | None = None) -> int:
    """Answer, in this process or in several, and return the exit code; the rest is as in training.py."""
    if launches_others(options):
        return launch_processes(module, words, options.nproc, options.hang_timeout, hear)
    watch(options.hang_timeout)
    if options.eval_task == "rm":
        from trimtab.evaluate.scoring import score

        score(options)
    else:
        from trimtab.evaluate.generation import generate

        generate(options)
    return 0


def rehearse_generating(options: GenerateOptions) -> list[str]:
    if options.eval_task == "rm":
        from trimtab.evaluate.scoring import rehearse_scoring

        return rehearse_scoring(options)
    from trimtab.evaluate.generation import rehearse_generation

    return rehearse_generation(options)
