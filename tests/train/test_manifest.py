from pathlib import Path

import pytest

from trimtab.errors import UserError
from trimtab.train.run_directory import compare_manifests

PLACE = Path("checkpoint")


def test_weights_of_other_files_are_refused():
    with pytest.raises(UserError, match="its initial weights differ"):
        compare_manifests({"initial_weights": "files-12"}, {"initial_weights": "files-34"}, PLACE)
    with pytest.raises(UserError, match="its initial weights differ"):
        compare_manifests({"initial_weights": "12"}, {"initial_weights": "34"}, PLACE)
    assert compare_manifests({"initial_weights": "files-12"}, {"initial_weights": "files-12"}, PLACE) == []
