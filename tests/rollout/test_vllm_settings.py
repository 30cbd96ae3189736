"""What a vLLM engine is started with, as far as it can be seen without vLLM."""

import pytest

from tests.tiny import tiny_model
from trimtab.rollout.factory import engine_environment
from trimtab.rollout.vllm.engine import longest_that_fits, why_refused


def test_the_controllers_environment_wins(monkeypatch):
    monkeypatch.delenv("VLLM_LOGGING_LEVEL", raising=False)
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "7")
    found = engine_environment()
    assert found["VLLM_CPU_KVCACHE_SPACE"] == "7" and found["VLLM_LOGGING_LEVEL"] == "ERROR"


def test_an_engine_is_not_asked_for_more_than_the_models_context(tmp_path):
    model = tiny_model("llama")
    model.save_pretrained(tmp_path)
    context = model.config.max_position_embeddings
    asked = (None, 16, context, context + 1)
    assert [longest_that_fits(str(tmp_path), length) for length in asked] == [None, 16, context, context]


@pytest.mark.parametrize(
    "told, line",
    [
        ("", "ValueError"),
        ("No memory for a block.\nTry less.", "No memory for a block."),
        (
            "1 validation error for ModelConfig\n  Value error, No such architecture. [type=value_error]\n  more",
            "No such architecture.",
        ),
    ],
)
def test_a_refusal_is_the_line_that_says_why(told, line):
    assert why_refused(ValueError(told)) == line
