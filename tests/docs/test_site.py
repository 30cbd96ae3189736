"""The documentation site: built strictly, whole, and without anything from elsewhere."""

import runpy
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import pytest

import trimtab
from trimtab.cli.main import VERBS
from trimtab.config.jobs import JOBS
from trimtab.config.option import options_of

PROJECT = Path(__file__).parents[2]
SOURCES = SimpleNamespace(**runpy.run_path(str(PROJECT / "docs" / "site" / "sources.py")))


class Elements(HTMLParser):
    """The addresses that a page loads by itself, those its reader may follow, and the names of its places."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.followed: list[str] = []
        self.places: set[str] = set()
        self.words: list[str] = []
        self.feed(page.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        self.places.add(found.get("id", ""))
        self.loaded += [found["src"]] if "src" in found else []
        if "href" in found:
            (self.followed if tag == "a" else self.loaded).append(found["href"])

    def handle_data(self, data: str) -> None:
        self.words.append(data)


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    words = ["build", "--strict", "--config-file", str(PROJECT / "mkdocs.yml"), "--site-dir", str(folder)]
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", *words], cwd=PROJECT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, f"mkdocs build --strict:\n{done.stdout}{done.stderr}"
    return folder


def test_every_document_is_a_page_of_the_site(site):
    pages = [f"{path.stem}.html" for path in PROJECT.glob("docs/*.md")]
    assert "sft.html" in pages and [page for page in pages if not (site / page).is_file()] == []
    assert "Steer" in (site / "index.html").read_text()


def test_no_page_loads_anything_from_elsewhere(site):
    pages = {path: Elements(path) for path in site.rglob("*.html")}
    loaded = [(path.name, address) for path, page in pages.items() for address in page.loaded]
    assert any(address.endswith(".css") for _, address in loaded)
    assert [(name, address) for name, address in loaded if "//" in address] == []
    for path, page in pages.items():
        if path.name != "404.html":  # it may be shown at any address, so its own begin at the root
            near = [address.partition("#")[0].partition("?")[0] for address in page.loaded if address[:5] != "data:"]
            assert [address for address in near if address and not (path.parent / address).exists()] == [], path


def test_sources_that_pages_link_to_are_shown(site):
    calculator = Elements(site / "source" / "examples" / "agents" / "calculator.py.html")
    assert "def" in "".join(calculator.words)
    followed = Elements(site / "agents.html").followed
    assert "source/examples/agents/calculator.py.html" in followed


@pytest.mark.parametrize("verb", VERBS)
def test_a_page_of_a_command_names_every_option(site, verb):
    text = "".join(Elements(site / "commands" / f"{verb}.html").words)
    names = options_of(JOBS[verb]) if verb in JOBS else {"help": None}
    assert [name for name in names if f"--{name}" not in text] == []


def test_the_reference_has_every_public_name(site):
    places = Elements(site / "reference.html").places
    public = {*trimtab.__all__, *trimtab._PLACES} - {"__version__"}
    assert "Error" in public and [name for name in public if f"trimtab.{name}" not in places] == []


def test_links_out_of_the_folder_become_links_inside_the_site():
    def moved(text: str, path: str) -> str:
        return SOURCES.with_links_of_the_site(text, path)

    assert moved("[a](../examples/train_dpo.sh)", "docs/dpo.md") == "[a](source/examples/train_dpo.sh.md)"
    assert moved("[a](../examples)", "docs/dpo.md") == "[a](source/examples/index.md)"
    assert moved("[a](../README.md) [b](rl.md#the-loop)", "docs/dpo.md") == "[a](index.md) [b](rl.md#the-loop)"
    assert moved("[a](docs/rl.md#the-loop)", "README.md") == "[a](rl.md#the-loop)"
    assert moved("[a](docs/rl.md) [b](CHANGELOG.md)", "CONTRIBUTING.md") == "[a](../rl.md) [b](CHANGELOG.md)"


def test_a_page_without_a_place_stands_at_the_end():
    config = SimpleNamespace(nav=[{"All": ["index.md", {"Learning": ["sft.md"]}]}])
    (more,) = SOURCES.on_config(config).nav[1:]
    assert "rl.md" in more["More"] and "sft.md" not in more["More"]


def test_links_that_lead_nowhere_or_elsewhere_and_code_stay_as_they_are():
    for text in ("[a](nowhere.md)", "[a](https://example.org/b.md)", "[a](#b)", "```\nx[0](rl.md)\n```\n"):
        assert SOURCES.with_links_of_the_site(text, "README.md") == text
