"""Weights of the hub: what cannot be fetched is told in one line."""

import json

import huggingface_hub
import pytest
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

from trimtab.data import hub
from trimtab.errors import UserError
from trimtab.models.pretrained import INDEX, SINGLE, WeightFiles


@pytest.fixture
def hub_with(monkeypatch):
    def install(answers: dict, *, reachable=True):
        def download(name, file, *, local_files_only):
            assert name == "owner/model" and local_files_only is not reachable
            answer = answers.get(file, answers.get("*"))
            if isinstance(answer, Exception):
                raise answer
            return answer

        monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
        monkeypatch.setattr(hub, "hub_reachable", lambda: reachable)

    return install


@pytest.mark.parametrize(
    ("answers", "line"),
    [
        ({"*": OSError("403 Client Error.\n\nAccess to model owner/model is restricted")}, "403 Client Error."),
        ({SINGLE: EntryNotFoundError("no"), "*": ConnectionError("peer closed")}, "peer closed"),
        ({SINGLE: EntryNotFoundError("no"), INDEX: "index", "*": EntryNotFoundError("no shard")}, "no shard"),
    ],
)
def test_a_download_that_fails_is_told_in_one_line_with_the_option(hub_with, tmp_path, answers, line):
    (tmp_path / "index").write_text(json.dumps({"weight_map": {"a": "model-00001-of-00001.safetensors"}}))
    hub_with({file: tmp_path / answer if answer == "index" else answer for file, answer in answers.items()})
    with pytest.raises(UserError) as caught:
        WeightFiles.find("owner/model", "--ref_pretrain")
    assert str(caught.value) == f"--ref_pretrain owner/model: {line}"


def test_half_a_model_in_the_cache_without_a_hub_is_told_as_everywhere(hub_with, tmp_path):
    (tmp_path / "index").write_text(json.dumps({"weight_map": {"a": "model-00001-of-00001.safetensors"}}))
    missing = LocalEntryNotFoundError("not in the cache")
    hub_with({SINGLE: missing, INDEX: tmp_path / "index", "*": missing}, reachable=False)
    with pytest.raises(UserError, match=r"--pretrain owner/model: .* the hub cannot be reached"):
        WeightFiles.find("owner/model", "--pretrain")


def test_a_model_without_safetensors_is_not_a_mistake(hub_with):
    hub_with({"*": EntryNotFoundError("no")})
    assert WeightFiles.find("owner/model", "--pretrain") is None
