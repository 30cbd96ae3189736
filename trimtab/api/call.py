"""A call from Python as a run: its options are checked and started as those of a command are."""

import dataclasses
import itertools
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

from trimtab.api.arguments import FOLDER, Arguments, as_arguments
from trimtab.config.jobs import TRAINED, GenerateOptions, TrainedOptions
from trimtab.config.parser import parse_values
from trimtab.config.resolved_config import redact
from trimtab.config.training_options import CallOptions
from trimtab.errors import Error, Interrupted, RunFailed, UserError, error_chain
from trimtab.files import LOCK, locked, remove, writing
from trimtab.job import (
    installation_error,
    launches_others,
    on_a_cluster,
    prepared,
    rehearse_job,
    start_job,
    trusting_code,
)

RUNS = Path("runs")
KILLED = re.compile(r"process \d+ was ended by signal")  # the launcher's line, followed by where to resume
KEPT_LINES = 40
Job = TypeVar("Job", bound=CallOptions)
Listener = Callable[[dict[str, Any]], object]


def train(verb: str, arguments: Arguments, on_iteration: Listener | None) -> Path:
    """Run a training job and return its folder."""
    from trimtab.train.metrics import row_listener

    if on_iteration is not None and not callable(on_iteration):
        raise UserError(f"on_iteration takes a function, not {type(on_iteration).__name__}")
    parse_values(TRAINED[verb], arguments.values)  # before a folder is made for it
    with run_folder(verb, arguments.values) as values, row_listener(on_iteration):
        options: TrainedOptions = prepared(parse_values(TRAINED[verb], values), arguments.given.folder)
        check_reachable(options, arguments)
        if launches_others(options) and on_iteration is not None:
            raise UserError(
                f"--nproc {options.nproc}: on_iteration would be called in another process; leave it out, and read "
                "metrics.jsonl"
            )
        try:
            run(options, values, arguments, options.save_path)
        except (Interrupted, RunFailed) as ended:
            resume = f"trimtab.open({options.save_path!r}).resume() goes on"
            ended.args = (str(ended).replace("add --load_checkpoint to go on", resume),)
            raise
    return Path(options.save_path)


def run(
    options: TrainedOptions | GenerateOptions, values: Mapping[str, Any], arguments: Arguments, folder: str
) -> None:
    """Start a job, or its dry run, with its objects as files in `folder`; no error tells a key."""
    from trimtab.rewards.functions import register_functions

    try:
        with trusting_code(options), register_functions(arguments.functions):
            if options.dry_run:
                with TemporaryDirectory(prefix="trimtab-dry-run-") as temporary:
                    for line in rehearse_job(with_paths(options, arguments.given.move_to(temporary))):
                        print(redact(line, options))
                return
            if arguments.given and not isinstance(options, GenerateOptions):
                from trimtab.train.run_directory import set_aside_finished_run

                set_aside_finished_run(options, print)  # before the run does, which would set these files aside too
                with writing(f"--save_path {folder}: cannot write there"), locked("save_path", Path(folder)):
                    moved = arguments.given.move_to(folder)
            else:
                moved = arguments.given.move_to(folder)
            output = ProcessOutput(options.verb)
            output.check(start_job(with_paths(options, moved), in_words(values, moved), output))
    except Error as error:
        error.args = (redact(str(error), options),)  # notebooks are shared
        raise


@contextmanager
def run_folder(verb: str, values: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The options with a folder, a new one where none is named. Where no run began in it, it is left as it was."""
    if values.get("save_path") is not None:
        if not str(values["save_path"]):
            raise UserError("save_path is empty; name a folder, or leave it out")
        folder, made = Path(str(values["save_path"])).expanduser(), False
    elif values.get("config") is not None:
        yield values
        return
    elif values.get("load_checkpoint"):
        raise UserError("resume: say which run goes on, with save_path")
    else:
        folder, made = _new_folder(verb), True
    existed = folder.exists() and not made
    try:
        yield {**values, "save_path": str(folder)}
    finally:
        if folder.is_dir() and not (folder / "manifest.json").exists():
            remove(folder / FOLDER)
            if not existed:
                remove(folder / LOCK)
                for place in (folder, RUNS) if made else (folder,):
                    with suppress(OSError):  # it is not empty
                        place.rmdir()


def _new_folder(verb: str) -> Path:
    for number in itertools.count(1):
        folder = RUNS / f"{verb}-{number}"
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError:
            continue
        except OSError as error:
            raise UserError(f"save_path: cannot make {folder} here ({error.strerror}); name a folder") from error
    raise AssertionError


class call_errors:
    """Inside, a known fault of the installation becomes a UserError, and messages name arguments instead of options
    (`names`: arguments by the options that they stand for). A trimtab.Error leaves without our traceback; its cause is
    the exception of the caller's own function, if that was the reason."""

    def __init__(self, job_class: type, names: Mapping[str, str]):
        self.job_class, self.names = job_class, names

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if not isinstance(error, Exception):
            return
        told = installation_error(error)
        if isinstance(told, Error):
            told.args = (as_arguments(str(told), self.job_class, self.names),)
            from trimtab.sandbox.calls import UserCodeError

            chain = error_chain(told, contexts=False)
            cause = next((link.__cause__ for link in chain if isinstance(link, UserCodeError)), None)
            raise told.with_traceback(None) from cause


def check_reachable(options: CallOptions, arguments: Arguments) -> None:
    """Refuse objects of this process in a run of several, which do not have them."""
    if int(os.environ.get("WORLD_SIZE", 1)) > 1 and arguments.given:
        raise UserError("under a launcher every process would write what was given: give files and folders instead")
    if not arguments.functions or not (on_a_cluster(options) or launches_others(options)):
        return
    name = next(iter(arguments.functions))
    how = "--ray" if on_a_cluster(options) else f"--nproc {getattr(options, 'nproc', 1)}"
    raise UserError(
        f"{how}: the reward {name} is a function of this process, and other processes do not have it: write it to a "
        f"file and give FILE.py:{name}"
    )


def with_paths(options: Job, moved: Callable[[Any], Any]) -> Job:
    """The options with the final paths of the objects' files."""
    changes = {
        known.name: moved(value)
        for known in dataclasses.fields(options)
        if isinstance(value := getattr(options, known.name), str)
    }
    return dataclasses.replace(options, **changes)


def in_words(values: Mapping[str, Any], moved: Callable[[Any], Any]) -> list[str]:
    """Options as the words of a command."""
    words: list[str] = []
    for name, value in values.items():
        if isinstance(value, list | tuple | range | set | frozenset):
            words += [f"--{name}", *map(str, value)]
        else:
            words.append(f"--{name}={moved(value)}")
    return words


class ProcessOutput:
    """The output of the first of several processes: passed on, and where they fail, raised as an error."""

    def __init__(self, verb: str):
        self.verb = verb
        self._lines: list[str] = []

    def __call__(self, line: str, error: bool) -> None:
        print(line, file=sys.stderr if error else sys.stdout, flush=True)
        if error:
            self._lines.append(line)
            del self._lines[:-KEPT_LINES]

    def check(self, code: int) -> None:
        """Raise what one process would have raised, if this exit code says that they failed."""
        if not code:
            return
        name = f"trimtab {self.verb}: "
        if killed := next((line for line in self._lines if KILLED.match(line)), None):
            raise RunFailed(f"{killed}; {self._lines[-1]}")
        kinds: list[tuple[str, type[Error]]] = [(f"{name}failed: ", RunFailed), (f"{name}error: ", UserError)]
        # A mistake ends one process with code 2, and others lose their connection to it: their lines may come later.
        for words, kind in reversed(kinds) if code == 2 else kinds:
            for line in reversed(self._lines):
                if words in line:
                    raise kind(line.partition(words)[2])
        if code > 128:
            said = next((line for line in reversed(self._lines) if line.startswith(name)), f"{name}stopped")
            raise Interrupted(code - 128, said.removeprefix(name))
        last = self._lines[-1] if self._lines else "it said nothing"
        raise RunFailed(f"a process ended with exit code {code}: {last}")
