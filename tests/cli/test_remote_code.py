"""Code that comes with a model runs only where --trust_remote_code says so, whatever stands on standard input."""

import io
import json

import pytest

from tests.tiny import tiny_model
from tests.train.job_run import write_rows
from trimtab.cli.main import main
from trimtab.embedded.sort_task import make_rows, make_tokenizer, prompt_of, reference_of

STRANGER = """
from pathlib import Path
from transformers import {base} as Base
Path({marker!r}).touch()
class Strange(Base):
    {body}
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A model, the same with a tokenizer that brings code, and one whose config does; 'y' waits for any question."""
    tokenizer = make_tokenizer()
    model = tiny_model("llama", vocab_size=len(tokenizer))
    for name in ("good", "tokenizer", "config"):
        model.save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    strange(
        tmp_path / "tokenizer", "tokenizer_config.json", "PreTrainedTokenizerFast", AutoTokenizer=[None, "code.Strange"]
    )
    auto = {"AutoConfig": "code.Strange", "AutoModelForCausalLM": "code.Strange"}
    auto["AutoModelForSequenceClassification"] = "code.Strange"
    strange(tmp_path / "config", "config.json", "PretrainedConfig", **auto)
    rows = make_rows(8, seed=1)
    write_rows(tmp_path / "sft.jsonl", rows)
    pairs = [{"prompt": prompt_of(r), "chosen": reference_of(r), "rejected": "3 1"} for r in rows]
    write_rows(tmp_path / "pairs.jsonl", pairs)
    write_rows(tmp_path / "prompts.jsonl", [{"input": prompt_of(row)} for row in rows])
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 20))
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    return tmp_path


def strange(folder, name, base, **auto_map):
    content = json.loads((folder / name).read_text())
    content.pop("tokenizer_class", None)
    if name == "config.json":
        content["model_type"] = "strange"
        body = 'model_type = "strange"'
    else:
        body = "pass"
    (folder / name).write_text(json.dumps(content | {"auto_map": auto_map}))
    marker = str(folder.parent / "marker")
    (folder / "code.py").write_text(STRANGER.format(base=base, marker=marker, body=body))


GRPO = "grpo --prompt_data {0}/prompts.jsonl --generate_max_len 8 --save_path {0}/out"
JOBS = {
    "sft": "sft --pretrain {bad} --dataset {0}/sft.jsonl --save_path {0}/out",
    "sft --dry_run": "sft --dry_run --pretrain {bad} --dataset {0}/sft.jsonl --save_path {0}/out",
    "plan": "plan sft --pretrain {bad} --dataset {0}/sft.jsonl --save_path {0}/out",
    "rm": "rm --pretrain {bad} --dataset {0}/pairs.jsonl --save_path {0}/out",
    "dpo reference": "dpo --pretrain {0}/good --ref_pretrain {bad} --dataset {0}/pairs.jsonl --save_path {0}/out",
    "kd teacher": "kd --pretrain {0}/good --teacher_model {bad} --dataset {0}/sft.jsonl --save_path {0}/out",
    "grpo": f"{GRPO} --pretrain {{bad}} --reward_verifier length(0-6)",
    "grpo reward": f"{GRPO} --pretrain {{0}}/good --reward_pretrain {{bad}}",
    "generate": "generate --pretrain {bad} --dataset {0}/prompts.jsonl --output_path {0}/out.jsonl",
    "chat": "chat --pretrain {bad}",
    "serve": "serve {bad} --port 0",
    "serve-rm": "serve-rm --reward_pretrain {bad} --port 0",
}


CASES = [(job, kind) for job in JOBS for kind in ("tokenizer", "config")]
CASES.remove(("plan", "tokenizer"))  # it needs none


@pytest.mark.parametrize("job, kind", CASES)
def test_code_that_comes_with_a_model_is_not_run(folder, capfd, job, kind):
    assert main(JOBS[job].format(folder, bad=folder / kind).split()) == 2
    assert not (folder / "marker").exists()
    lines = [line for line in capfd.readouterr().err.splitlines() if "warning:" not in line]
    assert len(lines) == 1 and str(folder / kind) in lines[0] and "and add --trust_remote_code" in lines[0]


def test_code_runs_where_the_user_says_so_and_a_line_says_it_too(folder, capfd):
    main([*JOBS["sft --dry_run"].format(folder, bad=folder / "tokenizer").split(), "--trust_remote_code"])
    assert (folder / "marker").exists()
    assert "code that comes with the models is run" in capfd.readouterr().err
