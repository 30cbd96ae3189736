"""The pages of README.md and docs/, and their fenced blocks.

A block that no test runs has a comment above it, which a reader of the page does not see: `<!-- not run: REASON -->`.
"""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

PROJECT = Path(__file__).parents[2]
DOCS = PROJECT / "docs"
PAGES = [PROJECT / "README.md", *sorted(DOCS.glob("*.md"))]
FENCE = re.compile(
    r"(?:^<!-- not run: (?P<reason>[^\n]+?) -->\n+)?^```(?P<language>[^\n]*)\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
COMMAND = re.compile(
    r"^(\$ )?(trimtab [\w-]+(?= |$)|(printf|python3?|torchrun|deepspeed|make|pip|ray|\.|source|export) )", re.MULTILINE
)


@dataclass(frozen=True)
class Block:
    page: str
    line: int
    language: str
    text: str
    reason: str | None
    """Why it is not run."""

    @property
    def place(self) -> str:
        return f"{self.page}.md:{self.line}"

    def commands(self) -> list[list[str]]:
        """Those that begin a line."""
        lines = self.text.replace("\\\n", " ").splitlines()
        return [shlex.split(line.removeprefix("$ "), comments=True) for line in lines if COMMAND.match(line)]


def blocks_of(path: Path) -> list[Block]:
    text = path.read_text()
    return [
        Block(path.stem, text[: found.start("language")].count("\n") + 1, *found.group("language", "text", "reason"))
        for found in FENCE.finditer(text)
    ]


def runnable(page: str, language: str) -> list[Block]:
    """The blocks of a page that its test runs."""
    (path,) = [path for path in PAGES if path.stem == page]
    return [block for block in blocks_of(path) if block.language == language and block.reason is None]


def blocks(page: str, language: str) -> list[str]:
    return [block.text for block in runnable(page, language)]


def commands(page: str) -> list[list[str]]:
    return [words for block in runnable(page, "bash") for words in block.commands()]
