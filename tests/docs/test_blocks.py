"""Every fenced block of README.md and docs/*.md is run by a test or says why it is not (pages.py), and its commands are
understood by the programs that they name."""

import re
import shlex
import tomllib
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

from tests.config.every_job import EVERY_JOB
from tests.docs.pages import COMMAND, PAGES, PROJECT, Block, blocks_of
from trimtab.cli.main import VERBS, CommandParser, main
from trimtab.config.option import find
from trimtab.embedded import sort_task

RUN_BY = {
    **dict.fromkeys(
        ["sft", "reward_model", "process_reward", "dpo", "kto", "rewards", "generate", "rl", "plan"],
        "tests/embedded/test_docs_commands.py",
    ),
    **dict.fromkeys(["distillation", "serve", "rollout", "check"], "tests/embedded/test_docs_commands.py"),
    **dict.fromkeys(["from_trl", "from_openrlhf", "from_verl", "from_prime_rl"], "tests/docs/test_coming_from.py"),
    "agents": "tests/embedded/test_docs_agents.py",
    "compare": "tests/cli/test_compare.py",
    "async": "tests/cli/test_async_page.py",
    "cluster": "tests/cluster/test_page.py",
    "learner": "tests/api/test_learner_documents.py",
    "paddlenlp": "tests/embedded/test_docs_paddlenlp.py",
    "python": "tests/api/test_python_documents.py",
    "README": "tests/api/test_python_documents.py",
    "repulse": "tests/train/tail/test_page.py",
    "watch": "tests/cli/test_watch.py",
}
"""The test that runs the blocks of a page in bash and Python."""
READ_BY = {"diff": "tests/config/test_estimators.py"}
"""The test of blocks in other languages."""
OUTPUTS = ("--save_path", "--output_path", "--output_dir", "--ckpt.output_dir", "--record")


class Understood(BaseException):
    """The parser has taken all words."""


@pytest.fixture
def quickstarted(tmp_path, monkeypatch):
    """A folder with what the quickstart leaves, as far as commands name it: models are empty folders."""

    class Saved:
        save_pretrained = staticmethod(partial(Path.mkdir, parents=True, exist_ok=True))

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sort_task, "make_model", lambda seed: Saved)
    monkeypatch.setattr(sort_task, "make_tokenizer", lambda: Saved)
    sort_task.write("quickstart/task", train_rows=1, test_rows=1, judged_rows=1)
    for run in ("sft", "grpo"):
        Path("quickstart", run).mkdir()
    return tmp_path


@pytest.fixture
def understood(monkeypatch):
    """Whether the verb's own parser takes these words; nothing is run."""

    def stop(*_, **__):
        raise Understood

    parse = CommandParser.parse_args
    monkeypatch.setattr(CommandParser, "parse_args", lambda self, words: stop(parse(self, words)))
    monkeypatch.setattr("trimtab.cli.commands._print_plan", stop)
    monkeypatch.setattr("trimtab.cli.main.prepared", stop)

    def check(words: list[str]) -> bool:
        try:
            main(words)
        except Understood:
            return True
        return False

    return check


def test_every_block_is_run_by_a_test_or_says_why_not():
    found = [block for path in PAGES for block in blocks_of(path)]
    assert len(PAGES) > 30 and 2 * len(found) == sum(path.read_text().count("\n```") for path in PAGES)
    wrong = {block.place: told for block in found if (told := not_run(block))}
    assert not wrong, "\n".join(f"{place}: {told}" for place, told in wrong.items())


def not_run(block: Block) -> str | None:
    """Why it does not count as run, if it does not."""
    if block.reason is not None:
        return None if len(block.reason.split()) > 1 else "a reason is needed, in words"
    match block.language:
        case "bash" | "python":
            test = RUN_BY.get(block.page)
            runs = test is not None and re.search(rf"\b{block.page}\b", (PROJECT / test).read_text())
            return None if runs else "no test runs this page: add one, or <!-- not run: REASON --> above the block"
        case "text":
            return "a command: make it bash, and run it, or say why not" if COMMAND.search(block.text) else None
        case "yaml":
            return None if yaml.safe_load(block.text) else "no YAML"
        case "toml":
            return None if tomllib.loads(block.text) else "no TOML"
        case "console":
            return None if block.commands() else "no command"
        case language:
            read = f"{block.page}.md" in (PROJECT / READ_BY[language]).read_text()
            return None if read else f"{READ_BY[language]} does not read it"


def test_every_command_is_understood_and_reads_only_what_is_there(quickstarted, understood, capsys):
    wrong = []
    for path in PAGES:
        made = {"quickstart"}
        for block in blocks_of(path):
            if named := re.match(r"# (\w+\.py)\n", block.text):  # a file that the reader writes
                made.add(named.group(1))
            for words in block.commands():
                if (told := mistake(words, made, understood, capsys)) is not None:
                    wrong.append(f"{block.place}: {shlex.join(words)}: {told}")
    assert not wrong, "\n".join(wrong)


def mistake(words: list[str], made: set[str], understood, capsys) -> str | None:
    """What is wrong with a command. `made`: files that earlier commands of its page have written, which it adds to."""
    program, *rest = words
    told = None  # another program's: the page says that it is not run
    modules = [word for before, word in zip(words, rest) if before in ("-m", "--module") and "trimtab" in word]
    if program == "trimtab":
        told = of_trimtab(rest[0], rest[1:], understood, capsys)
    elif program == "make":
        known = re.search(rf"^{rest[0]}:", (PROJECT / "Makefile").read_text(), re.M)
        told = None if known else f"the Makefile has no {rest[0]}"
    elif modules:
        told = None if find_spec(modules[0]) else f"there is no module {modules[0]}"
    elif program == "python" and rest[0].endswith(".py") and rest[0] not in made:
        told = of_script(PROJECT / rest[0], rest[1:])
    inputs = [word for before, word in zip(words, rest) if before not in OUTPUTS]
    made |= {word.removeprefix("./").split("/")[0] for before, word in zip(words, rest) if before in OUTPUTS}
    for word in inputs:
        folder = word.removeprefix("./").split("/")[0]
        if folder == "quickstart" and not Path(word).exists() and program == "trimtab" and words[1] != "quickstart":
            return f"the quickstart makes no {word}"
        if folder.startswith("my-") and folder not in made:
            return f"no command before it on the page makes {word}"
    return told


def of_trimtab(verb: str, options: list[str], understood, capsys) -> str | None:
    if verb not in VERBS:
        return f"there is no verb {verb}"
    if any("..." in word for word in options):  # the rest is the reader's: its options exist
        names = [word[2:].partition("=")[0] for word in options if word.startswith("--") and word != "--"]
        unknown = [name for name in names if not any(find(job, name) for job in EVERY_JOB) and verb != "jobs"]
        return f"there is no --{unknown[0]}" if unknown else None
    if "--config" in options:  # written by an earlier command, or the reader's own
        path = Path(options[options.index("--config") + 1])
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    return None if understood([verb, *options]) else capsys.readouterr().err.strip() or "it ran"


def of_script(path: Path, options: list[str]) -> str | None:
    if not path.is_file():
        return f"there is no {path.name}"
    source = "".join(other.read_text() for other in {path, *path.parent.glob("*.py")})
    unknown = [word for word in options if re.fullmatch(r"--\w+", word) and f'"{word}"' not in source]
    return f"{path.name} has no {unknown[0]}" if unknown else None
