"""From a job's words to its run: parse, check, then rehearse or start. Mistakes become one line and exit code 2."""

import sys
import traceback
from collections.abc import Callable, Sequence
from typing import TypeVar

from trimtab.config.option import Options
from trimtab.config.parser import parse
from trimtab.config.resolved_config import redact, secrets_of, to_yaml
from trimtab.config.training_options import CallOptions
from trimtab.errors import Interrupted, RunFailed, UserError
from trimtab.running.faults import in_our_words
from trimtab.running.preparing import prepared, trusting_code
from trimtab.running.speaking import say

Job = TypeVar("Job", bound=CallOptions)


def run_job(
    job_class: type[Job],
    argv: Sequence[str] | None,
    start: Callable[[Job], int | None],
    rehearse: Callable[[Job], list[str]] | None = None,
) -> int:
    """Run one job and return its exit code.

    `start` and `rehearse` get checked options and import what is heavy themselves. In a dry run, standard output is a
    config that `--config` reads: what `rehearse` has to say follows it as comments.
    """
    name = f"trimtab {job_class.verb}"
    options: Job | None = None
    try:
        options = parse(job_class, sys.argv[1:] if argv is None else argv)
        # Loggers copy the command line of the process, however it got here.
        sys.argv[1:] = [redact(word, options) for word in sys.argv[1:]]
        options = prepared(options)
        with trusting_code(options):
            if not options.dry_run:
                return start(options) or 0
            print(to_yaml(options), end="", flush=True)
            for line in rehearse(options) if rehearse else []:
                print(redact(f"# {line}", options))
        return 0
    except SystemExit as leaving:
        if options is None:
            return int(leaving.code or 0)  # --help
        raise
    except Exception as error:
        return _exit_code(name, error, options)
    except KeyboardInterrupt:
        say(f"{name}: interrupted", options)
        return 130


def guarded(name: str, action: Callable[[], int | None]) -> int:
    """Run a command that is not a job with the same manners, and return its exit code."""
    try:
        return action() or 0
    except Exception as error:
        return _exit_code(name, error)
    except KeyboardInterrupt:
        say(f"{name}: interrupted")
        return 130


def _exit_code(name: str, error: Exception, options: Options | None = None) -> int:
    told = in_our_words(error)
    if isinstance(told, UserError):
        say(f"{name}: error: {' '.join(str(told).splitlines())}", options)
        return 2
    if isinstance(told, RunFailed):
        say(f"{name}: failed: {' '.join(str(told).splitlines())}", options)
        return 1
    if isinstance(told, Interrupted):
        say(f"{name}: {told}", options)
        return told.exit_code
    if not secrets_of(options):
        raise error
    say("".join(traceback.format_exception(error)).rstrip(), options)
    return 1
