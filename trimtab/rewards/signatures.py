"""Reward functions with the signatures of other projects, and the service that calls them in a worker process.

| project  | signature                                                           | called      |
|----------|---------------------------------------------------------------------|-------------|
| OpenRLHF | reward_func(queries, prompts, labels)                               | a batch     |
| TRL      | f(prompts, completions, **columns)                                  | a batch     |
| verl     | compute_score(data_source, solution_str, ground_truth, extra_info)  | one sample  |

Worker processes load functions from here (`load_service`), so it imports nothing heavy. `read_signature` reads a
signature from a file's text, without running the file.
"""

import ast
import inspect
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from trimtab.rewards.types import RewardRequest
from trimtab.sandbox.calls import FunctionService
from trimtab.sandbox.worker import load_module, parse_source

PREFERRED = ("reward_func", "compute_score")
MARKS = {"OpenRLHF": {"queries"}, "TRL": {"completions"}, "verl": {"solution_str"}}
"""The parameters that distinguish a signature from the others."""
EXPECTED = (
    "(queries, prompts, labels), (prompts, completions, **columns) or "
    "(data_source, solution_str, ground_truth, extra_info)"
)

NO_COLUMNS = {"prompt", "completion"}  # TRL gives these as prompts and completions alone
OFFERED = {
    "OpenRLHF": {"queries", "prompts", "labels"},
    "TRL": {"prompts", "completions", "completion_ids", "labels", "trainer_state", "log_extra", "log_metric"},
    "verl": {"data_source", "solution_str", "ground_truth", "extra_info"},
}
"""The arguments that a function gets whatever the data are; TRL's gets their columns besides."""


class FunctionNotFound(Exception):
    """The file has no reward function, or several."""


class LoggedValues:
    """What a function of TRL's kind logs besides its rewards. The run keeps numbers."""

    def __init__(self) -> None:
        self.logged: dict[str, Any] = {}

    def of_samples(self, column: str, values: list[Any]) -> None:
        if all(isinstance(value, int | float) for value in values):
            self.logged[column] = list(values)

    def of_batch(self, name: str, value: float) -> None:
        self.logged[name] = value

    def beside(self, answer: Any) -> Any:
        """The function's answer, with what it logged."""
        return {"rewards": answer, "extra_logs": self.logged} if self.logged else answer

    async def awaited(self, answer: Awaitable[Any]) -> Any:
        return self.beside(await answer)


@dataclass(frozen=True)
class Signature:
    project: str
    function: Callable[..., Any]
    parameters: frozenset[str] | None
    """Names it takes; None: any."""

    def missing_parameters(self, columns: Iterable[str]) -> list[str]:
        """Parameters without a default that data with these columns do not fill."""
        offered = OFFERED[self.project] | (set(columns) - NO_COLUMNS if self.project == "TRL" else set())
        named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        return [
            parameter.name
            for parameter in inspect.signature(self.function).parameters.values()
            if parameter.kind in named and parameter.default is parameter.empty and parameter.name not in offered
        ]

    @property
    def batched(self) -> bool:
        return self.project != "verl"

    @property
    def reads_ids(self) -> bool:
        """Whether it reads token ids, and not only texts."""
        return self.project == "TRL" and (self.parameters is None or "completion_ids" in self.parameters)

    @property
    def is_async(self) -> bool:
        return inspect.iscoroutinefunction(self.function)

    def split(self, request: RewardRequest) -> list[RewardRequest]:
        """The requests for each of which the function is called."""
        return [request] if self.batched else [request.take([row]) for row in range(len(request))]

    def call(self, request: RewardRequest) -> Any:
        """What the function returns for these samples (verl's: for the one there is), or its coroutine."""
        offered = getattr(self, f"_{self.project.lower()}")(request)
        logged = LoggedValues()
        if self.project == "TRL":
            offered |= {"trainer_state": None, "log_extra": logged.of_samples, "log_metric": logged.of_batch}
        if self.parameters is not None:
            offered = {name: value for name, value in offered.items() if name in self.parameters}
        answer = self.function(**offered)
        return logged.awaited(answer) if self.is_async else logged.beside(answer)

    def _openrlhf(self, request: RewardRequest) -> dict[str, Any]:
        return {"queries": request.queries, "prompts": request.prompts, "labels": request.labels}

    def _trl(self, request: RewardRequest) -> dict[str, Any]:
        prompts: list[Any] = request.prompts
        completions: list[Any] = request.responses
        if request.conversations:
            prompts = request.conversations
            completions = [[{"role": "assistant", "content": response}] for response in request.responses]
        own = {"prompts": prompts, "completions": completions, "completion_ids": request.response_ids}
        columns = {name: values for name, values in request.columns.items() if name not in NO_COLUMNS}
        return {"labels": request.labels} | columns | own

    def _verl(self, request: RewardRequest) -> dict[str, Any]:
        row = {name: values[0] for name, values in request.columns.items()}
        return {
            "data_source": row.get("data_source"),
            "solution_str": request.responses[0],
            "ground_truth": request.truth(0),
            "extra_info": row.get("extra_info"),
        }


def load_service(source: str) -> FunctionService:
    """For worker processes: the function of FILE.py or FILE.py:FUNCTION."""
    file, name = parse_source(source)
    found = find_signature(load_module(file, "reward_file"), name)
    about = {
        "name": found.function.__name__,
        "batched": found.batched,
        "is_async": found.is_async,
        "reads_ids": found.reads_ids,
    }
    return FunctionService(about, str(file), found.split, found.call, found.is_async)


def find_signature(module: ModuleType, name: str | None = None) -> Signature:
    """The reward function of a module: the one called `name`, or the only one there is."""
    if name is not None:
        if not callable(getattr(module, name, None)):
            raise FunctionNotFound(f"there is no function {name} in it")
        found = recognize(getattr(module, name))
        if found is None:
            raise FunctionNotFound(f"the parameters of {name} are none of {EXPECTED}")
        return found
    known = {
        name: signature
        for name, value in vars(module).items()
        if callable(value) and not name.startswith("_") and (signature := recognize(value)) is not None
    }
    for preferred in PREFERRED:
        if preferred in known:
            return known[preferred]
    own = {name: found for name, found in known.items() if found.function.__module__ == module.__name__}
    if len(own) > 1:
        raise FunctionNotFound(
            f"{', '.join(own)} could all be meant: name one after a colon, as in FILE.py:{next(iter(own))}"
        )
    if not own:
        raise FunctionNotFound(f"there is no function in it whose parameters are {EXPECTED}")
    return next(iter(own.values()))


def read_signature(file: Path, name: str | None = None) -> Signature | None:
    """The signature of `find_signature`, from the text of the file. None: it shows only when the file is run, because
    a decorator, an import or an assignment may have made the function."""
    try:
        statements = ast.parse(file.read_bytes()).body
    except (OSError, SyntaxError, ValueError):
        return None
    functions: dict[str, ast.FunctionDef | ast.AsyncFunctionDef] = {}
    made_otherwise: set[str] = set()
    for statement in statements:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef) and not statement.decorator_list:
            functions[statement.name] = statement
        else:
            made_otherwise |= _names_bound(statement)
    if "*" in made_otherwise or made_otherwise & {*functions, *((name,) if name else PREFERRED)}:
        return None
    stub = ModuleType("stub")
    for function in functions.values():
        exec(compile(ast.Module([_without_code(function)], []), str(file), "exec"), vars(stub))
    try:
        return find_signature(stub, name)
    except FunctionNotFound:
        return None


def _without_code(function: ast.FunctionDef | ast.AsyncFunctionDef) -> ast.stmt:
    """The function with nothing but its parameters: no body, no annotations, and None for every default."""
    for node in ast.walk(function.args):
        if isinstance(node, ast.arg):
            node.annotation = None
    function.args.defaults = [ast.Constant(None) for _ in function.args.defaults]
    function.args.kw_defaults = [default and ast.Constant(None) for default in function.args.kw_defaults]
    function.body, function.returns = [ast.Pass()], None
    return ast.fix_missing_locations(function)


def _names_bound(statement: ast.stmt) -> set[str]:
    """Names that a statement of a module may define, those inside functions and classes included."""
    names: set[str] = set()
    for node in ast.walk(statement):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.alias):
            names.add(node.asname or node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names


def recognize(function: Callable[..., Any]) -> Signature | None:
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return None
    takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    for project, marks in MARKS.items():
        if marks <= parameters.keys():
            return Signature(project, function, None if takes_any else frozenset(parameters))
    return None
