import pytest

from tests.tiny import tiny_model
from tests.train.job_run import write_rows
from trimtab.embedded.sort_task import make_prompts, make_rows, make_tokenizer

PROMPTS = 4


@pytest.fixture(scope="session")
def task(tmp_path_factory):
    """model/, rows.jsonl to imitate and prompts.jsonl with labels."""
    folder = tmp_path_factory.mktemp("task")
    tokenizer = make_tokenizer()
    tiny_model("llama", vocab_size=len(tokenizer)).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    write_rows(folder / "rows.jsonl", make_rows(8, seed=1))
    write_rows(folder / "prompts.jsonl", make_prompts(PROMPTS, 1))
    return folder


@pytest.fixture(autouse=True)
def somewhere(tmp_path, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path
