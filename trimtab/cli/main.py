"""`trimtab VERB ...`: the table of verbs, and what the modules of the verbs share.

A verb is a module with `main(argv)`, which returns the exit code, or a MODULE:FUNCTION; it is imported when the verb is
used. Verbs of jobs go through `run_job`: parse, check, then dry run or start. Mistakes become one line and exit code 2.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import importlib
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn, TextIO, TypeVar

import trimtab
from trimtab.config.aliases import VERBS as VERBS_OF_OTHERS
from trimtab.config.jobs import JOBS
from trimtab.config.option import Options
from trimtab.config.parser import parse, take_negative_numbers
from trimtab.config.repulse_aliases import in_words_of_tail, is_repulse
from trimtab.config.resolved_config import redact, secrets_of, to_yaml
from trimtab.config.training_options import CallOptions
from trimtab.errors import Interrupted, RunFailed, UserError
from trimtab.job import installation_error, prepared, rehearse_job, say, start_job, trusting_code

VERBS: dict[str, tuple[str, str]] = {
    "quickstart": ("trimtab.cli.quickstart", "train a tiny model on this machine and look at what it learnt"),
    "tour": (
        "trimtab.cli.quickstart:tour_main",
        "the quickstart, then reward model, PPO, DPO and KTO on the same task, compared",
    ),
    "sft": ("trimtab.cli.train_sft", "supervised fine-tuning"),
    "rm": ("trimtab.cli.train_rm", "reward model, from pairs of answers"),
    "prm": ("trimtab.cli.train_prm", "process reward model, from answers judged step by step"),
    "dpo": ("trimtab.cli.train_dpo", "preference optimisation from pairs: DPO, IPO, cDPO, ORPO, SimPO"),
    "kto": ("trimtab.cli.train_kto", "preference optimisation from single judged answers"),
    "kd": ("trimtab.cli.train_kd", "distillation from a teacher model"),
    "ppo": ("trimtab.cli.train_ppo", "RL with a critic (PPO)"),
    "grpo": ("trimtab.cli.train_grpo", "RL by comparing the answers to a prompt (GRPO)"),
    "dapo": ("trimtab.cli.train_dapo", "GRPO that clips higher and samples on past groups that teach nothing (DAPO)"),
    "reinforce": ("trimtab.cli.train_reinforce", "RL without a critic (REINFORCE++)"),
    "rloo": ("trimtab.cli.train_rloo", "RL against the mean of a prompt's other answers (RLOO)"),
    "rl": ("trimtab.cli.train_rl", "RL of any kind, as a config file says"),
    "tail": ("trimtab.cli.train_tail", "RL that makes rare bad answers rarer (RePULSe and its baselines)"),
    "check": ("trimtab.cli.commands:check", "every check of a training job on its loaded model, without training"),
    "generate": ("trimtab.cli.batch_inference", "answers to many prompts, and their scores"),
    "play": (
        "trimtab.cli.interactive_chat:play_main",
        "an environment, played by you or by a model, as training sees it",
    ),
    "chat": ("trimtab.cli.interactive_chat", "a conversation with a model"),
    "lora-combine": ("trimtab.cli.lora_combiner", "merge a LoRA adapter into its model"),
    "serve": ("trimtab.cli.serve_rm:serve_main", "a model as an HTTP server that other projects' clients accept"),
    "serve-rm": ("trimtab.cli.serve_rm", "a reward model, a process reward model or a verifier as an HTTP server"),
    "kk-data": ("trimtab.cli.commands:kk_data", "knights-and-knaves puzzles as rows of PaddleNLP's recipe"),
    "attack": ("trimtab.cli.evaluate_gcg_sz", "search for suffixes that make a model misbehave (GCG)"),
    "plot": ("trimtab.cli.commands:plot", "draw curves and frontiers of several runs"),
    "plan": ("trimtab.cli.commands:plan", "what memory and time a training job needs, on this device or another"),
    "jobs": ("trimtab.cli.commands:jobs", "write Slurm or shell files for a command over seeds"),
    "report": ("trimtab.cli.commands:report", "turn a run's metrics into a page to look at"),
    "watch": ("trimtab.cli.commands:watch", "a run while it works, or after: in the terminal, or as a live page"),
    "push": ("trimtab.cli.commands:push", "upload the model of a run with its model card to the Hugging Face hub"),
    "compare": ("trimtab.cli.commands:compare", "judge whether two runs are the same training on two devices"),
}


def main(argv: Sequence[str] | None = None) -> int:
    typed = list(sys.argv[1:] if argv is None else argv)
    if not typed or typed[0] in ("-h", "--help", "help"):
        print(_help())
        return 0
    if typed[0] == "--version":
        print(f"trimtab {trimtab.__version__}")
        return 0
    verb = typed[0]
    if verb not in VERBS:
        print(f"trimtab: error: {_unknown(verb)}", file=sys.stderr)
        return 2
    module, _, function = VERBS[verb][0].partition(":")
    return guarded(f"trimtab {verb}", lambda: getattr(importlib.import_module(module), function or "main")(typed[1:]))


def _help() -> str:
    verbs = "\n".join(f"  {verb:<14}{line}" for verb, (_, line) in VERBS.items())
    return (
        f"{trimtab.__doc__}\n\nusage: trimtab VERB [option ...]\n       trimtab --version\n\n{verbs}\n\n"
        "trimtab VERB --help lists a verb's options most used, trimtab VERB --help all every one."
    )


def _unknown(verb: str) -> str:
    if verb in VERBS_OF_OTHERS:
        return f"unknown verb {verb!r}; {VERBS_OF_OTHERS[verb]} is what does this here"
    close = difflib.get_close_matches(verb.removeprefix("train_"), VERBS, n=1, cutoff=0.5)
    hint = f"did you mean trimtab {close[0]}?" if close else f"the verbs are {', '.join(VERBS)}"
    return f"unknown verb {verb!r}; {hint}"


# ---- verbs with a few arguments


class CommandParser(argparse.ArgumentParser):
    """argparse, except that a mistake is a UserError of one line instead of a usage text."""

    def __init__(self, program: str, description: str):
        super().__init__(
            prog=program,
            description=description,
            allow_abbrev=False,
            formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        )
        take_negative_numbers(self)

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; see {self.prog} --help")


def read_line() -> str:
    """The next line of standard input, with a prompt at a terminal."""
    return input("> " if sys.stdin.isatty() else "").strip()


def enable_line_editing() -> None:
    with contextlib.suppress(ImportError):  # not on every system
        import readline  # noqa: F401 (input() then has a history and arrow keys)


# ---- verbs of jobs

Job = TypeVar("Job", bound=CallOptions)


def job_main(verb: str, translate: Callable[[Sequence[str]], Sequence[str]] = list) -> Callable[..., int]:
    """The `main` of a job that trains or generates; `translate` turns the typed words into its own.

    RePULSe's documents start all their methods as train_ppo: such a command is one of `trimtab tail`.
    """

    def main(argv: Sequence[str] | None = None) -> int:
        words = translate(sys.argv[1:] if argv is None else argv)
        with steady_output():
            if verb == "ppo" and is_repulse(words):
                return guarded("trimtab tail", lambda: as_tail(words, own=argv is None))
            return run(verb, words)

    def as_tail(words: Sequence[str], own: bool) -> int:
        translated = in_words_of_tail(words)
        if own:  # loggers copy the words of the process, and keys are taken out of them there
            sys.argv[1:] = translated
        return run("tail", translated)

    def run(verb: str, words: Sequence[str]) -> int:
        job: type[Any] = JOBS[verb]  # one that trains or generates
        return run_job(job, words, lambda options: start_job(options, words), rehearse_job)

    return main


def run_job(
    job_class: type[Job],
    argv: Sequence[str] | None,
    start: Callable[[Job], int | None],
    rehearse: Callable[[Job], list[str]] | None = None,
) -> int:
    """Run one job and return its exit code.

    `start` and `rehearse` get checked options and import heavy libraries themselves. In a dry run, standard output is a
    config that `--config` reads; the lines of `rehearse` follow it as comments.
    """
    options: Job | None = None

    def run() -> int | None:
        nonlocal options
        try:
            options = parse(job_class, sys.argv[1:] if argv is None else argv)
        except SystemExit as leaving:  # --help
            return int(leaving.code or 0)
        # Loggers copy the command line of the process, however it got here.
        sys.argv[1:] = [redact(word, options) for word in sys.argv[1:]]
        options = prepared(options)
        with trusting_code(options):
            if not options.dry_run:
                return start(options)
            print(to_yaml(options), end="", flush=True)
            for line in rehearse(options) if rehearse else []:
                print(redact(f"# {line}", options))
        return 0

    return guarded(f"trimtab {job_class.verb}", run, lambda: options)


def guarded(name: str, action: Callable[[], int | None], options: Callable[[], Options | None] = lambda: None) -> int:
    """The exit code of a command: its own, or that of the error that ended it, which is printed as one line.

    `options`: the command's, once they are parsed; their keys are never printed.
    """
    try:
        return action() or 0
    except Exception as error:
        told = installation_error(error)
        if isinstance(told, UserError):
            say(f"{name}: error: {' '.join(str(told).splitlines())}", options())
            return 2
        if isinstance(told, RunFailed):
            say(f"{name}: failed: {' '.join(str(told).splitlines())}", options())
            return 1
        if isinstance(told, Interrupted):
            say(f"{name}: {told}", options())
            return told.exit_code
        if not secrets_of(options()):
            raise
        say("".join(traceback.format_exception(error)).rstrip(), options())
        return 1
    except KeyboardInterrupt:
        say(f"{name}: interrupted", options())
        return 130


# ---- Standard output that may go away while a run goes on: `| head`, a tee that died, a connection that dropped.


class SteadyStream:
    """A stream for text. Once it can no longer be written to, writing does nothing and raises no error."""

    def __init__(self, stream: TextIO):
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError:
            self._let_go()
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError:
            self._let_go()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _let_go(self) -> None:
        """Point the descriptor at nothing, for what is still in a buffer and for Python's own last flush."""
        with contextlib.suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)


@contextlib.contextmanager
def steady_output() -> Iterator[None]:
    """Inside, a standard output or error that goes away is no error."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (None if stream is None else SteadyStream(stream) for stream in before)
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
        sys.stdout, sys.stderr = before


if __name__ == "__main__":
    raise SystemExit(main())
