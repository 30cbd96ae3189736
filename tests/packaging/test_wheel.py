"""What the wheel holds. `make wheel` also installs it where nothing else is."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> zipfile.ZipFile:
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    # Of a copy, so that nothing is written beside the source; no tests, no documents: the wheel has neither.
    for name in ("pyproject.toml", "README.md", "LICENSE", "MANIFEST.in", "trimtab"):
        subprocess.run(["cp", "-r", str(PROJECT / name), str(source)], check=True)
    script = f"import setuptools.build_meta as backend; print(backend.build_wheel({str(folder)!r}))"
    done = subprocess.run([sys.executable, "-c", script], cwd=source, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return zipfile.ZipFile(folder / done.stdout.splitlines()[-1])


def test_it_has_every_file_of_the_source(wheel):
    files = {path for path in (PROJECT / "trimtab").rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    missing = {str(path.relative_to(PROJECT)) for path in files} - {*wheel.namelist()}
    assert len(files) > 100 and not missing, "name them in package-data of pyproject.toml"


def test_it_has_the_type_marker_the_command_and_the_licence(wheel):
    names = wheel.namelist()
    assert "trimtab/py.typed" in names and not [name for name in names if name.startswith(("tests/", "docs/"))]
    (entries,) = (name for name in names if name.endswith("entry_points.txt"))
    assert "trimtab = trimtab.cli.main:main" in wheel.read(entries).decode()
    assert [name for name in names if name.endswith("licenses/LICENSE")]
