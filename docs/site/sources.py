"""A hook of mkdocs: README.md becomes the first page, and files outside docs/ that a page links to become pages too.

So links stay those that work in the repository and in an editor, and the site needs no other place to point at.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

REPOSITORY = Path(__file__).resolve().parents[2]
PROJECT_PAGES = ("CONTRIBUTING.md", "CHANGELOG.md", "CODE_OF_CONDUCT.md", "SECURITY.md")
"""Pages of the project that always are in the site, whether or not somebody links to them."""
LANGUAGES = {".py": "python", ".sh": "bash", ".yaml": "yaml", ".yml": "yaml", ".toml": "toml", ".cpp": "cpp"}

_LINK = re.compile(r"(?<=\]\()(?!\w+:|#|/)([^)\s#]+)(#[^)\s]*)?(?=\))")
_FENCE = re.compile(r"^(```|~~~).*?^\1[ \t]*$", re.MULTILINE | re.DOTALL)


def page_of(path: str) -> str:
    """Where a file or folder of the repository is in the site; of docs/ everything stays where it is."""
    if path == "README.md":
        return "index.md"
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    if path.endswith(".md"):
        return f"project/{path}"
    return f"source/{path}/index.md" if (REPOSITORY / path).is_dir() else f"source/{path}.md"


def source_of(page: str) -> str:
    """The inverse: what of the repository a page of the site shows."""
    if page == "index.md":
        return "README.md"
    if page.startswith("project/"):
        return page.removeprefix("project/")
    if page.startswith("source/"):
        return page.removeprefix("source/").removesuffix("/index.md").removesuffix(".md")
    return f"docs/{page}"


def with_links_of_the_site(text: str, path: str) -> str:
    """The text of a Markdown file of the repository, its links leading to the site's pages."""
    folder, page = posixpath.dirname(path), page_of(path)

    def of_the_site(found: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, found[1]))
        if not (REPOSITORY / target).exists():
            return found[0]  # mkdocs says that it leads nowhere
        return posixpath.relpath(page_of(target), posixpath.dirname(page) or ".") + (found[2] or "")

    return _outside_code(text, lambda part: _LINK.sub(of_the_site, part))


def targets(text: str, path: str) -> Iterator[str]:
    """What of the repository the links of a Markdown file lead to."""
    found: list[str] = []
    _outside_code(text, lambda part: found.extend(match[1] for match in _LINK.finditer(part)) or part)
    for target in found:
        whole = posixpath.normpath(posixpath.join(posixpath.dirname(path), target))
        if (REPOSITORY / whole).exists():
            yield whole


def _outside_code(text: str, change) -> str:
    parts, end = [], 0
    for fence in _FENCE.finditer(text):
        parts += [change(text[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*parts, change(text[end:])])


def shown(path: str) -> str:
    """A page about a file or a folder that is not Markdown."""
    place = REPOSITORY / path
    if place.is_file():
        language = LANGUAGES.get(place.suffix, "text")
        return f"# {path}\n\n````{language}\n{place.read_text().rstrip()}\n````\n"
    members = sorted(m for m in place.iterdir() if m.suffix in LANGUAGES or (m.is_dir() and m.name[0] not in "._"))
    links = [f"- [{member.name}]({member.name}{'/index' if member.is_dir() else ''}.md)" for member in members]
    return "\n".join([f"# {path}/", "", *links, ""])


def outside_pages() -> dict[str, str]:
    """The pages made of files outside docs/, and their texts: those that a page links to, and so on."""
    pages: dict[str, str] = {}
    waiting = ["README.md", *(name for name in PROJECT_PAGES if (REPOSITORY / name).exists())]
    for page in sorted((REPOSITORY / "docs").glob("*.md")):
        waiting += targets(page.read_text(), f"docs/{page.name}")
    while waiting:
        path = waiting.pop()
        if path.startswith("docs/") or page_of(path) in pages:
            continue
        if path.endswith(".md"):
            text = (REPOSITORY / path).read_text()
            pages[page_of(path)] = with_links_of_the_site(text, path)
            waiting += targets(text, path)
        else:
            pages[page_of(path)] = shown(path)
            if (REPOSITORY / path).is_dir():
                links = re.findall(r"\]\((.*?)\)", pages[page_of(path)])
                waiting += [f"{path}/{link.removesuffix('/index.md').removesuffix('.md')}" for link in links]
    return pages


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """A page for which mkdocs.yml has no place stands at the end, under More, instead of nowhere."""
    placed = set(_places(config.nav))
    more = [path.name for path in sorted((REPOSITORY / "docs").glob("*.md")) if path.name not in placed]
    config.nav += [{"More": more}] if more else []
    return config


def _places(nav: Any) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
    else:
        for member in nav.values() if isinstance(nav, dict) else nav:
            yield from _places(member)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    from mkdocs.structure.files import File, InclusionLevel

    for page, text in outside_pages().items():
        file = File.generated(config, page, content=text)
        if page.startswith("source/"):
            file.inclusion = InclusionLevel.NOT_IN_NAV
        files.append(file)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    if page.file.generated_by:  # its links are the site's already
        return markdown
    return with_links_of_the_site(markdown, source_of(page.file.src_uri))
