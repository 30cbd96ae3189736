"""Every causal family of the installed transformers as a tiny model, and how it runs: docs/models.md.

python -m tests.models.families writes the lists of that page anew.
"""

import re
import sys
import textwrap
import warnings
from pathlib import Path

import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests import tiny
from trimtab.data.batches import TokenBatch
from trimtab.models.packed import scoring
from trimtab.models.policy import Policy
from trimtab.models.selfcheck import choose_path
from trimtab.rollout.builtin.engine import BuiltinEngine
from trimtab.rollout.sampling import SamplingParams

PAGE = Path(__file__).parents[2] / "docs" / "models.md"

ENCODERS = """
bert bert-generation big_bird camembert data2vec-text electra ernie megatron-bert modernbert-decoder reformer rembert
roberta roberta-prelayernorm roc_bert roformer xlm xlm-roberta xlm-roberta-xl xlnet xmod
"""
SEQ2SEQ = """
bart bigbird_pegasus blenderbot blenderbot-small marian mbart moshi musicgen musicgen_melody mvp pegasus plbart
prophetnet trocr whisper
"""
OF_IMAGES_OR_BYTES = """
aria_text blt emu3 fuyu gemma3 gemma3n gemma4 gemma4_assistant gemma4_unified gemma4_unified_assistant
gemma4_unified_text git got_ocr2 llama4 minimax_m3_vl_text mllama phi4_multimodal qwen3_5 qwen3_5_moe qwen4_exp
"""
NO_TINY = "cohere_compass_text cpmant dbrx zamba inkling_text ctrl"  # their configurations cannot be made this small
LEFT_OUT = set(f"{ENCODERS} {SEQ2SEQ} {OF_IMAGES_OR_BYTES} {NO_TINY}".split())
NAMES = sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - LEFT_OUT)

# Few heads have equal scores of 0, of which topk takes any.
INDEXED = {"index_topk": 4, "index_head_dim": 16, "index_n_heads": 16, "layer_types": ["indexed_attention"] * 2}
SPARSE = tiny.LATENT | tiny.ROUTED | INDEXED | {"mlp_layer_types": ["dense", "sparse"]}
KNOWN = tiny.FAMILIES | tiny.LATENT_FAMILIES | tiny.VARIANT_FAMILIES | tiny.RECURRENT_FAMILIES | tiny.CYCLIC_FAMILIES
KNOWN |= {
    "axk1": tiny.LATENT | tiny.ROUTED,
    "axk2": tiny.LATENT | tiny.ROUTED | INDEXED,
    "codegen": {"rotary_dim": 8},
    "deepseek_v32": SPARSE,
    "dots1": tiny.ROUTED | {"n_shared_experts": 1},
    "glm_moe_dsa": SPARSE | {"indexer_types": ["full", "full"]},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "num_layers": 2, "num_heads": 4, "window_size": 5},
    "gptj": {"rotary_dim": 8, "n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 256},
    "hy_v4": SPARSE | {"indexer_types": ["full", "shared"], "head_dim": 8},
    "lfm2_moe": tiny.EXPERTS | {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "qwen3_5_moe_text": tiny.DELTA | tiny.QWEN2_EXPERTS,
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"], "num_mem_blocks": 1, "mamba_d_state": 8}
    | {"n_mamba_heads": 4, "mamba_ngroups": 1, "attention_head_dim": 16, "num_key_value_heads": 4},
    "zaya": {"num_experts": 4, "num_experts_per_tok": 1, "head_dim": 8, "moe_intermediate_size": 16}
    | {"router_hidden_size": 16, "layer_types": ["hybrid"] * 2}
    | {"rope_parameters": {"hybrid": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}},
}
USUAL = {"head_dim": 8, "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2}
USUAL |= {"moe_intermediate_size": 16, "n_group": 1, "topk_group": 1}


def tiny_config(name: str):
    kind = CONFIG_MAPPING[name]
    own = KNOWN.get(name)
    if own is None:
        usual = kind()
        own = {key: value for key, value in USUAL.items() if hasattr(usual, key)}
    try:
        return kind(**tiny.COMMON | own)
    except Exception:  # its list of layers has the usual length
        return kind(**tiny.COMMON | own | {"layer_types": None})


def tiny_policy(name: str) -> Policy:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(name)).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim >= 2:
                weight.normal_(0, tiny.SPREADS.get(name, 0.1))
    policy = Policy(model).eval()
    choose_path(policy)
    return policy


def log_prob_gap(policy: Policy) -> float:
    """Largest difference of sampled log-probs from the trainer's, with so little memory that sequences are
    preempted."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, tiny.VOCABULARY, length).tolist() for length in (3, 17, 9)]
    engine = BuiltinEngine(policy, page_size=4, kv_tokens=100, max_num_seqs=4)
    found = engine.generate(prompts, SamplingParams(max_new_tokens=9, n=2), seeds=range(3))
    examples = [
        (np.array([*r.prompt_ids, *r.ids]), np.repeat([False, True], [len(r.prompt_ids), len(r.ids)])) for r in found
    ]
    with scoring(policy):
        trained = policy(TokenBatch.of(examples)).log_probs_N
    return float((trained - torch.cat([torch.tensor(r.log_probs) for r in found])).abs().max())


def documented_padded() -> set[str]:
    """The families that run in padded rows, by docs/models.md."""
    return set(re.findall("`(.*?)`", _PADDED.search(PAGE.read_text())[1]))


_PADDED = re.compile(r"(?<=where it runs the model:\n)(.*?)(?=\.\n\n)", re.DOTALL)


def main() -> None:
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    padded = []
    for name in NAMES:
        policy = tiny_policy(name)
        print(name, policy.path, policy.not_packed, file=sys.stderr)
        if policy.path != "packed":
            padded.append(f"`{name}`")
    listed = textwrap.fill(", ".join(padded), 120, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False)
    text = _PADDED.sub(lambda _: listed, PAGE.read_text())
    PAGE.write_text(re.sub(r"\d+ causal families", f"{len(NAMES) - len(padded)} causal families", text))


if __name__ == "__main__":
    main()
