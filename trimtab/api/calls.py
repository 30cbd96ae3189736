"""What the functions of all training jobs do alike."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from trimtab.api.arguments import argument_names, resolved
from trimtab.api.call import call_errors, train
from trimtab.api.run import Run
from trimtab.config.jobs import TRAINED

Told = TypeVar("Told", bound=Callable[..., Any])

_SHARED = """\
        tokenizer: of a loaded model; a folder or a name brings its own.
        save_path: folder of the run; unset: runs/{verb}-N, the next that is free.
        resume: go on from the newest checkpoint in save_path, if there is one.
        on_iteration: called with every row of metrics as it is written (a dict).

    Every other option of the command is a keyword, under the flag's name and checked by the same code:
    ``trimtab.options({verb!r})`` lists them, ``trimtab {verb} --help all`` and the documents explain them.

    Returns:
        A Run: metrics, alarms, model(), report(), resume().

    Raises:
        UserError: a mistake, in one line. Whatever ends a run on purpose is a trimtab.Error.
        RunFailed: training went wrong, or a reward did.
        Interrupted: Ctrl-C; everything is saved, and the message says how to go on.
"""


def documented(function: Told) -> Told:
    """The function with what all of them have in common at the end of its docstring."""
    function.__doc__ = f"{(function.__doc__ or '').rstrip()}\n{_SHARED.format(verb=function.__name__)}"
    return function


def start(
    verb: str,
    options: dict[str, Any],
    named: dict[str, Any],
    names: Mapping[str, str],
    *,
    tokenizer: Any,
    resume: bool,
    on_iteration: Callable[[dict[str, Any]], object] | None,
    reward: Any = None,
    environment: Any = None,
    tools: Sequence[Callable[..., Any]] = (),
) -> Run:
    """`named`: the arguments that stand for options of these names; `names`: what the call names them."""
    named["load_checkpoint"] = True if resume else None
    names = argument_names({**names, "load_checkpoint": "resume"}, reward)
    objects = {"tokenizer": tokenizer, "reward": reward, "environment": environment, "tools": tools, "names": names}
    with call_errors(TRAINED[verb], names), resolved(TRAINED[verb], options, named, **objects) as arguments:
        path = train(verb, arguments, on_iteration=on_iteration)
    return Run(path, functions=arguments.functions)
