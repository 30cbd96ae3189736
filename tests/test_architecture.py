"""What docs/architecture.md says about imports, read off the source."""

import ast
import functools
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "trimtab"
FILES = sorted(ROOT.rglob("*.py"))

# What each part may know of the rest of the project; a dotted name is one module. Every part may know itself.
MAY_IMPORT = {
    "cli": {
        *("job", "config", "plan", "train", "rewards", "models", "distributed", "evaluate", "report", "embedded"),
        *("data.hub", "data.conversion", "envs", "rollout.trajectory", "errors", "files"),
        *("server", "sandbox"),
    },
    # What command and function have in common.
    "job": {
        *("config", "train", "evaluate", "report", "distributed", "data.hub", "errors", "files"),
    },
    # The same for callers in Python. Who gives options and objects wants everything but the words of a command.
    "api": {
        *("job", "config", "train", "rewards", "models", "distributed", "evaluate", "report", "embedded", "data"),
        *("algos", "rollout", "envs", "plan", "progress", "interrupts", "errors"),
        *("server", "sandbox", "files"),
    },
    "train": {
        *("data", "models", "plan", "algos", "rollout", "rewards", "distributed", "config", "progress", "interrupts"),
        *("envs", "server", "sandbox", "errors", "files"),
        "evaluate.tail_risk",
    },
    # What memory and time a job will need: one cost model of what training does.
    "plan": {"data", "models", "rollout", "rewards", "distributed", "config", "errors"},
    "models": {"data.batches", "data.hub", "distributed", "config", "interrupts", "errors", "files"},
    "rollout": {"data.batches", "models", "distributed", "errors"},
    "rewards": {
        *("data", "models", "distributed", "config", "rollout.episode", "sandbox", "errors", "files"),
        "algos",
    },
    # The sandbox runs user code in worker processes: reward functions and environments.
    "sandbox": {"distributed.serialization", "errors"},
    "envs": {"sandbox", "rollout", "data", "distributed", "errors"},
    # The policy server, the reward server, and what they share with the live page.
    "server": {
        *("envs", "rewards", "rollout", "data", "models", "distributed", "config", "sandbox"),
        "errors",
    },
    "data": {"config", "errors", "files"},
    "distributed": {"interrupts", "errors"},
    "algos": set(),
    "config": {"errors"},
    "evaluate": {
        *("data", "algos", "models", "distributed", "rollout", "rewards", "config", "progress", "interrupts"),
        *("envs", "server", "sandbox", "errors", "files"),
    },
    # Pages, the live page that is served, and the terminal view of a run.
    "report": {"evaluate", "server.http", "config", "errors", "files"},
    "embedded": {"data.tokenizer", "envs.types", "errors"},
    "progress": set(),
    "interrupts": {"errors"},
    "files": {"errors"},
    "errors": set(),
}

# Names of devices, of what torch calls them, and of the libraries between them.
OF_DEVICES = re.compile(r"cuda|(?<![a-z])(nccl|hccl|xccl|rocm|npu|xpu|mps|nvidia|ascend)(?![a-z])", re.IGNORECASE)
# Where they may be named: what knows devices, kernels for one kind, and figures of data sheets.
KNOWS_DEVICES = ("distributed/", "rollout/builtin/kernels/", "plan/hardware.py")
ASKS_FOR_ONE = re.compile(
    r"torch\.(cuda|npu|xpu|mps|backends\.(cuda|cudnn|mps))|is_(cuda|xpu|mps|npu)\b|\.cuda\(|[\"'](cuda|npu|xpu|mps)\b"
)


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def imports(path: Path) -> Iterator[tuple[str, int]]:
    """Every module a file imports, at its top or inside a function, and where."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: a relative import"
            yield node.module, node.lineno
            # `from trimtab.data import batches` imports the module trimtab.data.batches.
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)


def part_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def is_module(name: str) -> bool:
    place = ROOT.parent / name.replace(".", "/")
    return place.with_suffix(".py").is_file() or place.is_dir()


def allowed(importing: str, imported: str) -> bool:
    """Is it right that a part of the project imports a module of it? Both without the leading `trimtab.`."""
    own = imported == importing or imported.startswith(f"{importing}.")
    return own or any(imported == name or imported.startswith(f"{name}.") for name in MAY_IMPORT[importing])


def upward_imports(path: Path) -> list[str]:
    wrong = []
    modules = {(name, line) for name, line in imports(path) if name.startswith("trimtab.") and is_module(name)}
    for name, line in sorted(modules, key=lambda found: found[1]):
        imported = name.removeprefix("trimtab.")
        # `from trimtab.data import batches` names the package too: the module says more.
        is_parent = any(other.startswith(f"{name}.") and there == line for other, there in modules)
        if not is_parent and not allowed(part_of(path), imported):
            wrong.append(f"{path.relative_to(ROOT)}:{line} imports {name}")
    return wrong


def test_every_part_of_the_package_has_its_rule():
    parts = {part_of(path) for path in FILES} - {"__init__"}
    assert parts <= MAY_IMPORT.keys(), f"say in MAY_IMPORT what {parts - MAY_IMPORT.keys()} may import"


def test_imports_point_downwards():
    assert [line for path in FILES if part_of(path) != "__init__" for line in upward_imports(path)] == []


def test_no_two_parts_import_each_other():
    arrows = {(part, name.split(".")[0]) for part, names in MAY_IMPORT.items() for name in names}
    assert not {(low, high) for low, high in arrows if (high, low) in arrows}


@functools.cache
def names_in(module: str) -> set[str]:
    """What a module of the package defines or imports."""
    place = ROOT.parent / module.replace(".", "/")
    path = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
    names = {found.stem for found in place.iterdir()} if place.is_dir() else set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name):
            names.add(node.id)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
    return names


@pytest.mark.parametrize("folder", ["benchmarks", "examples", "tests"])
def test_names_of_the_package_that_scripts_and_tests_use_are_there(folder):
    """To replace what is not there does nothing, and benchmarks run too seldom to show it."""
    missing = []
    for path in sorted((ROOT.parent / folder).rglob("*.py")):
        modules, used, nodes = {}, [], list(ast.walk(ast.parse(path.read_text())))
        for node in nodes:
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "trimtab":
                for alias in node.names:
                    used.append((node.module, alias.name, node.lineno))
                    if is_module(f"{node.module}.{alias.name}"):
                        modules[alias.asname or alias.name] = f"{node.module}.{alias.name}"
        bound = {node.arg for node in nodes if isinstance(node, ast.arg)}
        bound |= {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        for node in nodes:
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and not node.attr.startswith("__"):
                name = node.value.id
                if name in modules and name not in bound:
                    used.append((modules[name], node.attr, node.lineno))
        missing += [
            f"{path.relative_to(ROOT.parent)}:{line} {module}.{name}"
            for module, name, line in used
            if not is_module(module) or name not in names_in(module)
        ]
    assert not missing


def import_graph() -> dict[str, set[str]]:
    """The files that each file imports when it runs, at its top or inside a function."""
    names = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in FILES}
    graph: dict[str, set[str]] = {}
    for name, path in names.items():
        annotations = {
            id(inner)
            for node in ast.walk(tree_of(path))
            if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
            for inner in ast.walk(node)
        }
        graph[name] = set()
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.ImportFrom) and id(node) not in annotations:
                found = {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
                graph[name] |= {module.removeprefix("trimtab.") for module in found if module} & names.keys() - {name}
    return graph


def test_files_import_each_other_in_no_circle():
    graph = import_graph()

    def reachable(start: str) -> set[str]:
        found: set[str] = set()
        ahead = list(graph[start])
        while ahead:
            if (name := ahead.pop()) not in found:
                found.add(name)
                ahead += graph[name]
        return found

    assert [name for name in graph if name in reachable(name)] == []


@pytest.mark.parametrize("engine", ["builtin", "vllm"])
def test_only_the_place_that_chooses_engines_knows_them(engine):
    package = f"trimtab.rollout.{engine}"
    inside = {path for path in FILES if path.is_relative_to(ROOT / "rollout" / engine)}
    knowing = {
        path.relative_to(ROOT).as_posix()
        for path in set(FILES) - inside
        for name, _ in imports(path)
        if name == package or name.startswith(f"{package}.")
    }
    assert inside and knowing == {"rollout/factory.py"}


def test_ray_is_imported_by_the_cluster_alone():
    for path in FILES:
        inside = path.is_relative_to(ROOT / "distributed" / "ray")
        assert inside or "ray" not in {name.split(".")[0] for name, _ in imports(path)}, path


def test_vllm_is_imported_by_its_own_engine_alone_and_where_it_is_used():
    inside = ROOT / "rollout" / "vllm"
    for path in FILES:
        tops = {node for node in tree_of(path).body if isinstance(node, ast.Import | ast.ImportFrom)}
        named = {alias.name for node in tops if isinstance(node, ast.Import) for alias in node.names}
        named |= {node.module or "" for node in tops if isinstance(node, ast.ImportFrom)}
        assert "vllm" not in {name.split(".")[0] for name in named}, path
        anywhere = {name.split(".")[0] for name, _ in imports(path)}
        assert "vllm" not in anywhere or path.is_relative_to(inside), path


def test_training_imports_environments_only_if_the_options_name_one():
    for path in [
        *(ROOT / "train").rglob("*.py"),
        *(ROOT / "rollout").rglob("*.py"),
        ROOT / "evaluate" / "generation.py",
    ]:
        tops = [node.module or "" for node in tree_of(path).body if isinstance(node, ast.ImportFrom)]
        assert not [name for name in tops if name.startswith(("trimtab.envs", "trimtab.server"))], path


def test_files_are_renamed_and_flushed_in_one_place():
    """Elsewhere a file would be half-written for a while, or written in a way of its own."""
    names = {"rename", "fsync", "mkstemp", "mkdtemp", "NamedTemporaryFile"}
    found = {
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in set(FILES) - {ROOT / "files.py"}
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        # A path's `replace` has one argument, a string's two.
        if node.func.attr in names
        or (node.func.attr == "replace" and len(node.args + node.keywords) == 1)
        or ast.unparse(node.func) == "os.replace"
    }
    assert found == set(), "use trimtab/files.py"


def test_the_mathematics_depends_on_torch_alone():
    for path in ROOT.glob("algos/*.py"):
        known = {name.split(".")[0] for name, _ in imports(path)} - sys.stdlib_module_names
        assert known <= {"torch", "trimtab"}, path


def names_and_words(path: Path) -> Iterator[str]:
    """Identifiers and texts of a file, but not its comments and docstrings."""
    tree = tree_of(path)
    documentation = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and node.body and _is_text(node.body[0])
    }
    # In config/ a text under a field is its help.
    documentation |= {id(node.value) for node in ast.walk(tree) if _is_text(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documentation:
            yield node.value


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def test_only_distributed_names_an_accelerator():
    found = {
        (str(path.relative_to(ROOT)), word)
        for path in FILES
        if not path.relative_to(ROOT).as_posix().startswith(KNOWS_DEVICES)
        for word in names_and_words(path)
        if OF_DEVICES.search(word)
    }
    # Values in other people's commands.
    words_of_others = {("config/placement_options.py", name) for name in ("nccl", "hccl", "xccl")}
    assert found - words_of_others == set()


def test_no_other_file_asks_torch_for_one_kind_of_device():
    """Comments and documentation included: whoever greps for it finds nothing."""
    found = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in FILES
        if not path.relative_to(ROOT).as_posix().startswith(KNOWS_DEVICES)
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if ASKS_FOR_ONE.search(line)
    ]
    assert found == []


@pytest.mark.parametrize("word", ["is_cuda", "npu", "cpu:gloo,xpu:xccl", "torch_npu", "NCCL_DEBUG", "mps"])
def test_the_name_of_a_device_is_seen(word):
    assert OF_DEVICES.search(word)


@pytest.mark.parametrize("word", ["AsyncClient", "input", "samples", "clamps", "output", "descend"])
def test_other_words_are_not_taken_for_one(word):
    assert not OF_DEVICES.search(word)


@pytest.mark.parametrize(
    "importing, imported, right",
    [
        ("train", "models.policy", True),
        ("models", "data.batches", True),
        ("models", "data.examples", False),
        ("data", "models.load", False),
        ("report", "train.metrics", False),
        ("algos", "algos.tail", True),
        ("algos", "errors", False),
    ],
)
def test_the_rule_tells_right_from_wrong(importing, imported, right):
    assert allowed(importing, imported) is right


def test_an_upward_import_inside_a_function_is_seen(tmp_path, monkeypatch):
    monkeypatch.setattr("tests.test_architecture.ROOT", tmp_path / "trimtab")
    for name in ("train", "data"):
        (tmp_path / "trimtab" / name).mkdir(parents=True)
    (tmp_path / "trimtab" / "train" / "sft.py").write_text("")
    low = tmp_path / "trimtab" / "data" / "rows.py"
    low.write_text("def read():\n    from trimtab.train import sft\n    return sft\n")
    assert upward_imports(low) == ["data/rows.py:2 imports trimtab.train.sft"]
