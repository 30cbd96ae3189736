"""A call from Python as a run: its options are checked and started as those of a command are."""

import dataclasses
import itertools
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from trimtab.api.arguments import FOLDER, Arguments, Given, as_arguments
from trimtab.config.jobs import TRAINED, TrainedOptions
from trimtab.config.parser import parse_values
from trimtab.config.resolved_config import redact
from trimtab.config.training_options import CallOptions
from trimtab.errors import Error, Interrupted, RunFailed, UserError, error_chain
from trimtab.files import LOCK, locked, new_temporary_folder, remove, writing
from trimtab.job import installation_error, launches_others, on_a_cluster, prepared, trusting_code

if TYPE_CHECKING:
    from trimtab.api.types import Listener


RUNS = Path("runs")
KILLED = re.compile(r"process \d+ was ended by signal")  # what the launcher says, and then where to go on
HEARD_LINES = 40
LOAD = "--load_checkpoint"
Job = TypeVar("Job", bound=CallOptions)


def train(verb: str, arguments: Arguments, *, on_iteration: "Listener | None" = None) -> Path:
    """Run the job, and return its folder."""
    from trimtab.rewards.functions import register_functions
    from trimtab.train.metrics import row_listener

    if on_iteration is not None and not callable(on_iteration):
        raise UserError(f"on_iteration takes a function, not {type(on_iteration).__name__}")
    parse_values(TRAINED[verb], arguments.values)  # before a folder is made for it
    with run_folder(verb, arguments.values) as values:
        options: TrainedOptions = prepared(parse_values(TRAINED[verb], values), arguments.given.aside)
        check_can_be_asked(options, arguments)
        if launches_others(options) and on_iteration is not None:
            raise UserError(
                f"--nproc {options.nproc}: on_iteration would be called in another process; leave it out, and read "
                "metrics.jsonl"
            )
        with (
            without_keys(options),
            trusting_code(options),
            register_functions(arguments.functions),
            row_listener(on_iteration),
        ):
            if options.dry_run:
                _rehearse(options, arguments.given)
            else:
                _start(options, values, arguments.given)
    return Path(options.save_path)


def _rehearse(options: TrainedOptions, given: Given) -> None:
    from trimtab.job import rehearse_job

    home = new_temporary_folder("trimtab-dry-run")
    try:
        for line in rehearse_job(with_paths(options, given.move_in(str(home)))):
            print(redact(line, options))
    finally:
        remove(home)


def _start(options: TrainedOptions, values: Mapping[str, Any], given: Given) -> None:
    from trimtab.job import start_job
    from trimtab.train.run_directory import set_aside_finished_run

    if given:
        set_aside_finished_run(options, print)  # which the run itself does later, with what is in the folder by then
        with (
            writing(f"--save_path {options.save_path}: cannot write there"),
            locked("save_path", Path(options.save_path)),
        ):
            settled = given.move_in(options.save_path)
    else:
        settled = given.move_in(options.save_path)
    words, hearing = in_words(values, settled), Hearing(options.verb)
    try:
        hearing.check(start_job(with_paths(options, settled), words, hearing))
    except (Interrupted, RunFailed) as ended:
        go_on = f"trimtab.open({options.save_path!r}).resume() goes on"
        ended.args = (str(ended).replace(f"add {LOAD} to go on", go_on),)
        raise


@contextmanager
def run_folder(verb: str, values: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The options with a folder, one of their own where none is named. Where no run began in it, nothing stays of what
    was put there."""
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


@contextmanager
def without_keys(options: CallOptions) -> Iterator[None]:
    """Inside, no error tells a key: notebooks are shared, too."""
    try:
        yield
    except Error as error:
        error.args = (redact(str(error), options),)
        raise


class call_errors:
    """Inside, a fault of the installation is told in our words. Whatever ends a call on purpose leaves without a trace
    of where we noticed it, with what a function of the caller's raised, if that was the cause, and in the words of the
    call: options are its arguments (`names`: those that are called otherwise)."""

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
            raise told.with_traceback(None) from _raised_by_the_caller(told)


def _raised_by_the_caller(error: BaseException) -> BaseException | None:
    from trimtab.sandbox.calls import UserCodeError

    return next(
        (link.__cause__ for link in error_chain(error, contexts=False) if isinstance(link, UserCodeError)), None
    )


def check_can_be_asked(options: CallOptions, arguments: Arguments) -> None:
    """What lives in this process can be asked by this process alone."""
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


def with_paths(options: Job, settled: Callable[[Any], Any]) -> Job:
    """The options with the places of what was given."""
    changes = {
        known.name: settled(value)
        for known in dataclasses.fields(options)
        if isinstance(value := getattr(options, known.name), str)
    }
    return dataclasses.replace(options, **changes)


def in_words(values: Mapping[str, Any], settled: Callable[[Any], Any]) -> list[str]:
    """Options as the words of a command."""
    words: list[str] = []
    for name, value in values.items():
        if isinstance(value, list | tuple | range | set | frozenset):
            words += [f"--{name}", *map(str, value)]
        else:
            words.append(f"--{name}={settled(value)}")
    return words


class Hearing:
    """What the first of several processes says: passed on, and where they fail, raised."""

    def __init__(self, verb: str):
        self.verb = verb
        self._lines: list[str] = []

    def __call__(self, line: str, error: bool) -> None:
        print(line, file=sys.stderr if error else sys.stdout, flush=True)
        if error:
            self._lines.append(line)
            del self._lines[:-HEARD_LINES]

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
