"""Which layers of a model can be cut over processes, and how: a table of model families, by their names for layers.

    OUTPUTS   a linear layer cut by what it computes: each process has some of its outputs
    INPUTS    one cut by what it reads: each process reads the outputs that it has, and their results are added up
    KEYS      as OUTPUTS, where every process gets as many heads of keys; else whole, and each uses the heads it needs
    OF_HEADS  a small layer that every process has whole and uses on its own heads
    EXPERTS   a stack of experts, each of which is cut: its first matrices as OUTPUTS, its last as INPUTS

What is not named is whole and works alike in every process: norms, routers, score heads. The embedding and the output
head are found by Hugging Face's names and cut by vocabulary. A family that is not in the table may join two layers in
one matrix, or normalise over all heads at once: it has to be looked at before it is added here.
"""

from typing import Any, Literal

from trimtab.errors import UserError

Way = Literal["outputs", "inputs", "keys", "of heads", "experts"]
OUTPUTS: Way = "outputs"
INPUTS: Way = "inputs"
KEYS: Way = "keys"
OF_HEADS: Way = "of heads"
EXPERTS: Way = "experts"

ATTENTION: dict[str, Way] = {
    "self_attn.q_proj": OUTPUTS,
    "self_attn.k_proj": KEYS,
    "self_attn.v_proj": KEYS,
    "self_attn.o_proj": INPUTS,
}
NORMED_HEADS: dict[str, Way] = {"self_attn.q_norm": OF_HEADS, "self_attn.k_norm": OF_HEADS}
MLP: dict[str, Way] = {"mlp.gate_proj": OUTPUTS, "mlp.up_proj": OUTPUTS, "mlp.down_proj": INPUTS}
SHARED_EXPERT: dict[str, Way] = {name.replace("mlp.", "mlp.shared_expert."): way for name, way in MLP.items()}
MIXTURE: dict[str, Way] = {"mlp.experts": EXPERTS}

FAMILIES: dict[str, dict[str, Way]] = {
    "llama": ATTENTION | MLP,
    "mistral": ATTENTION | MLP,
    "qwen2": ATTENTION | MLP,
    "qwen3": ATTENTION | NORMED_HEADS | MLP,
    "gemma": ATTENTION | MLP,
    "gemma2": ATTENTION | MLP,
    "gemma3_text": ATTENTION | NORMED_HEADS | MLP,
    "mixtral": ATTENTION | MIXTURE,
    "qwen2_moe": ATTENTION | MLP | MIXTURE | SHARED_EXPERT,
    "qwen3_moe": ATTENTION | NORMED_HEADS | MLP | MIXTURE,
}
"""By `model_type` in config.json. Layers of a kind that a model does not have are not looked for."""

INNER_OF_EXPERTS = ("moe_intermediate_size", "intermediate_size")


def check_can_be_cut(config: Any, parts: int, told: str) -> None:
    """A UserError, in one line: this model cannot be cut into so many parts. `told`: of which model it is."""
    ways = FAMILIES.get(config.model_type)
    if ways is None:
        known = ", ".join(FAMILIES)
        raise UserError(f"{told}: layers of a {config.model_type} model cannot be cut; of {known} models they can")
    heads = config.num_attention_heads
    if heads % parts:
        fits = " or ".join(str(size) for size in range(2, heads + 1) if heads % size == 0)
        raise UserError(f"{told}: its {heads} attention heads cannot be shared out to {parts} processes, but to {fits}")
    if EXPERTS in ways.values():
        inner = next(getattr(config, name) for name in INNER_OF_EXPERTS if getattr(config, name, None))
        if inner % parts:
            raise UserError(f"{told}: its experts are {inner} wide, which {parts} processes cannot share")
    words = config.vocab_size
    if -(-words // parts) * (parts - 1) >= words:
        raise UserError(f"{told}: its vocabulary of {words} cannot be shared out to {parts} processes")


def way_of(name: str, ways: dict[str, Way]) -> Way | None:
    """How a module of a model is cut, by its name in it."""
    return next((way for layer, way in ways.items() if name.endswith(f".{layer}")), None)


def keys_used(heads: int, keys: int, parts: int, part: int) -> list[int]:
    """The heads of keys that a part's heads of queries read: each once, where each is read by as many; else one for
    every head of queries."""
    own = heads // parts
    read = [head * keys // heads for head in range(part * own, (part + 1) * own)]
    once = list(dict.fromkeys(read))
    return once if len({read.count(key) for key in once}) == 1 else read
