"""--report_samples: answers of the model before and after a run, in its folder and on its page."""

import json

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.cli.test_jobs import MODEL, PLACES, WORDS
from trimtab.embedded.sort_task import make_rows, prompt_of, reference_of
from trimtab.evaluate.report_samples import answer

WORDS = {"sft": ("--dataset", "train.jsonl"), **WORDS}


def samples_of(folder) -> list[dict]:
    return json.loads((folder / "samples.json").read_text())


def test_both_models_answer_the_prompts_of_the_data(job, place):
    ran = job("sft")(*MODEL, *PLACES, *WORDS["sft"], "--learning_rate", "0.05", "--report_samples", "3")
    assert ran.code == 0 and "warning" not in ran.err
    samples, rows = samples_of(place / "out"), make_rows(16, seed=1)[:3]
    assert [sample["prompt"] for sample in samples] == [prompt_of(row) for row in rows]
    assert [sample["reference"] for sample in samples] == [reference_of(row) for row in rows]
    length = 2 * max(len(reference_of(row)) + 1 for row in rows) + 8
    for name, folder in (("before", "model"), ("after", "out")):
        model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
        expected = answer(model, tokenizer, [prompt_of(row) for row in rows], length)
        assert [sample[name] for sample in samples] == expected
    assert any(sample["before"] != sample["after"] for sample in samples)
    assert "Answers before and after" in (place / "out" / "report.html").read_text()


@pytest.mark.parametrize("verb", ["dpo", "kto", "kd"])
def test_every_job_that_teaches_answers_can_show_them_with_adapters_too(verb, job, place):
    adapter = ("--lora_rank", "2") if verb == "dpo" else ()
    ran = job(verb)(*MODEL, *PLACES, *WORDS[verb], *adapter, "--report_samples", "2")
    assert ran.code == 0 and "warning" not in ran.err
    samples = samples_of(place / "out")
    assert len(samples) == 2 and all(sample["prompt"] and sample["reference"] for sample in samples)


def test_answers_of_an_earlier_run_in_the_folder_are_removed(job, place):
    (place / "out").mkdir()
    (place / "out" / "samples.json").write_text('[{"prompt": "old"}]')
    assert job("sft")(*MODEL, *PLACES, *WORDS["sft"]).code == 0
    assert not (place / "out" / "samples.json").exists()


def test_what_cannot_be_asked_is_refused(job):
    assert job("sft")(*MODEL, *PLACES, *WORDS["sft"], "--report_samples", "-1").mistake.startswith("--report_samples")
    words = ("--report_samples", "1", "--load_in_4bit", "--bf16", "--lora_rank", "2")
    assert "unquantised" in job("sft")(*MODEL, *PLACES, *WORDS["sft"], *words).mistake
    assert "report_samples" in job("rm")(*MODEL, *PLACES, *WORDS["rm"], "--report_samples", "1").mistake
