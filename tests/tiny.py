"""Models of a few thousand parameters, one for each family the tests need."""

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

VOCABULARY = 61

COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
QWEN2_EXPERTS = EXPERTS | {"shared_expert_intermediate_size": 16}
FAMILIES = {
    "llama": {},
    "llama_tied": {"tie_word_embeddings": True},
    "qwen2": {},
    "qwen3": {"head_dim": 8},
    "mistral": {"sliding_window": 5},
    "gemma": {"head_dim": 8},
    "gemma2": {"head_dim": 8, "sliding_window": 5, "query_pre_attn_scalar": 8, "final_logit_softcapping": 3.0},
    "gemma3_text": {"head_dim": 8, "sliding_window": 5, "query_pre_attn_scalar": 8},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": QWEN2_EXPERTS,
    # A window of every second layer, and said by its mask alone.
    "qwen2_moe_window": QWEN2_EXPERTS | {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    "phimoe": {  # its window is said by its mask alone
        **{"num_local_experts": 4, "num_experts_per_tok": 2},
        **{"sliding_window": 5, "router_jitter_noise": 0.0, "input_jitter_noise": 0.0},
    },
    "phi3_longrope": {
        "original_max_position_embeddings": 12,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": [1.0] * 4,
            "long_factor": [1.3, 2.0, 3.0, 5.0],
            "original_max_position_embeddings": 12,
        },
    },
    "qwen3_moe": EXPERTS | {"head_dim": 8},
    "granite": {"logits_scaling": 4.0},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "gpt2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "gpt_neox": {},
    "opt": {"ffn_dim": 64, "dropout": 0.0, "word_embed_proj_dim": 32},
    "bloom": {},
    "falcon": {},
}

LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
}
ROUTED = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
}
LATENT_FAMILIES = {  # multi-head latent attention: keys are wider than values
    "deepseek_v2": LATENT | ROUTED,
    "deepseek_v3": LATENT | ROUTED,
    "glm4_moe_lite": LATENT | ROUTED | {"mlp_layer_types": ["dense", "sparse"]},
    "longcat_flash": LATENT  # two attentions a layer
    | {"num_hidden_layers": 4, "num_layers": 2, "head_dim": 8, "ffn_hidden_size": 64, "expert_ffn_hidden_size": 16}
    | {"n_routed_experts": 4, "zero_expert_num": 2, "moe_topk": 2, "routed_scaling_factor": 1.0},
    "minicpm3": LATENT | {"dim_model_base": 32},
    "youtu": LATENT,
}
VARIANT_FAMILIES = {  # sinks; chunks; keys that layers share; layers with keys of different widths
    "gpt_oss": {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 5}
    | {
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    },
    "llama4_text": {"head_dim": 8, "intermediate_size_mlp": 64, "num_local_experts": 4, "moe_layers": [1]}
    | {"attention_chunk_size": 6, "no_rope_layers": [1, 0]},
    "gemma3n_text": {"head_dim": 8, "vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 8}
    | {"laurel_rank": 4, "num_kv_shared_layers": 1, "num_hidden_layers": 3, "sliding_window": 5, "altup_num_inputs": 2}
    | {"layer_types": ["full_attention", "sliding_attention", "full_attention"]}
    | {"intermediate_size": [64] * 3, "activation_sparsity_pattern": [0.0] * 3},
    "gemma4_text": {"head_dim": 8, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5}
    | {"vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 8},
}
LINEAR = {"layer_types": ["linear_attention", "full_attention"], "head_dim": 8}
DELTA = LINEAR | dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads", "num_experts_per_tok"), 2)
DELTA |= dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 8)
MAMBA2 = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8}
RECURRENT_FAMILIES = {  # layers with a state
    "qwen3_next": DELTA | {"num_experts": 0},
    "qwen3_5_text": DELTA,
    "olmo_hybrid": LINEAR,
    "kimi_linear": LATENT | ROUTED | LINEAR | {"linear_num_heads": 2, "linear_head_dim": 8},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "nemotron_h": {"layers_block_type": ["mamba", "attention", "moe"], "num_hidden_layers": 3, "mamba_num_heads": 4}
    | {"mamba_head_dim": 16, "ssm_state_size": 8, "n_groups": 2, "head_dim": 8}
    | {"n_routed_experts": 4, "num_experts_per_tok": 2},
    "granitemoehybrid": MAMBA2
    | {"layer_types": ["mamba", "attention"], "num_local_experts": 4, "num_experts_per_tok": 2},
    "falcon_h1": MAMBA2 | {"mamba_d_ssm": 64},  # both in every layer
    "bamba": MAMBA2 | {"attn_layer_indices": [1]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2, "mamba_d_state": 4},
    "mamba": {"state_size": 4},  # no attention at all
    "mamba2": {"num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 1},
}
CYCLIC_FAMILIES = {"hrm_text": {"head_dim": 8, "L_cycles": 1, "embedding_scale": 1.0}}  # layers run more than once


SPREADS = {"nemotron_h": 0.05}  # wider, transformers' two ways to compute its states differ by 1e-3 in fp32


def tiny_model(family: str = "llama", *, seed: int = 0, spread: float | None = None, **changes) -> PreTrainedModel:
    """`spread`: standard deviation of the matrices, by default wide enough that mistakes show in the log-probs."""
    spread = spread or SPREADS.get(family, 0.2)
    kinds = {"llama_tied": "llama", "qwen2_moe_window": "qwen2_moe", "phi3_longrope": "phi3"}
    own = (FAMILIES | LATENT_FAMILIES | VARIANT_FAMILIES | RECURRENT_FAMILIES | CYCLIC_FAMILIES)[family]
    config = CONFIG_MAPPING[kinds.get(family, family)](**{**COMMON, **own, **changes})
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.normal_(0, spread)
    return model.eval()
