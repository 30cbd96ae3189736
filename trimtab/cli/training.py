"""The body of every training command: words to options, then the run (trimtab.running)."""

import sys
from collections.abc import Callable, Sequence

from trimtab.cli.run import run_job
from trimtab.config.jobs import TRAINED, TrainedOptions
from trimtab.output import steady_output
from trimtab.running.training import rehearse_training, start_training


def main_of(verb: str) -> Callable[..., int]:
    """The `main` of the command `trimtab VERB`."""

    def main(argv: Sequence[str] | None = None) -> int:
        return training_main(verb, argv)

    return main


def training_main(verb: str, argv: Sequence[str] | None) -> int:
    """Run a training job and return its exit code."""
    words = sys.argv[1:] if argv is None else list(argv)

    def start(options: TrainedOptions) -> int:
        return start_training(options, f"trimtab.cli.train_{options.verb}", words)

    with steady_output():
        return run_job(TRAINED[verb], argv, start, rehearse_training)
