import importlib.resources
import subprocess
import sys

import pytest

import trimtab
from trimtab import errors


def test_importing_the_package_loads_nothing_heavy():
    script = "import sys, trimtab; dir(trimtab); trimtab.Error; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "transformers", "datasets", "numpy", "rich", "yaml"} & set(loaded)


def test_a_star_brings_every_name_but_the_one_that_python_has_too():
    assert set(trimtab.__all__) == (set(trimtab._PLACES) | {"__version__"}) - {"open"}


@pytest.mark.parametrize("name", trimtab._PLACES)
def test_every_name_that_is_promised_is_there(name):
    assert getattr(trimtab, name) is not None and name in dir(trimtab)


def test_a_name_that_is_not_there_is_pythons_own_error():
    with pytest.raises(AttributeError, match="module 'trimtab' has no attribute 'grpoo'"):
        trimtab.grpoo  # noqa: B018


def test_whatever_ends_a_run_on_purpose_is_caught_by_one_class():
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    own = {kind for kind in kinds if kind.__module__ == errors.__name__}
    assert trimtab.UserError in own and all(issubclass(kind, trimtab.Error) for kind in own)


def test_type_checkers_are_told_that_the_package_is_typed():
    assert importlib.resources.files("trimtab").joinpath("py.typed").is_file()
