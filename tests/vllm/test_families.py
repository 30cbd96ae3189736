"""The column of vLLM in docs/models.md."""

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CLASSES

from tests.models.families import NAMES, documented


def test_architectures_that_vllm_lists_are_documented():
    from vllm import ModelRegistry

    listed = set(ModelRegistry.get_supported_archs())
    known = {name: traits.vllm for name, traits in documented().items() if name in NAMES}
    assert known == {name: "yes" if CLASSES[name] in listed else "-" for name in known}
