"""Every causal family of the installed transformers as a tiny model, and how it runs: the table of docs/models.md.

python -m tests.models.families tries all of them anew (8 minutes) and writes that table; with names, those alone, and
the rows of the others stay as they are.
"""

import contextlib
import copy
import io
import json
import re
import shutil
import sys
import tempfile
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests import tiny, warm
from tests.models.sharing import PACKED, batch_of, close
from tests.train.job_run import assert_same_tensors, preference_rows, rows, weights, write_rows
from trimtab.cli.main import main as command
from trimtab.data.batches import TokenBatch
from trimtab.distributed.device import find_device
from trimtab.distributed.mesh import Mesh
from trimtab.distributed.process_group import find_world, leave_world
from trimtab.embedded.sort_task import make_prompts, make_rows, make_tokenizer
from trimtab.models.fused_layer import is_llama_like
from trimtab.models.packed import backbone_of, scoring
from trimtab.models.parallel.context_parallel import ContextParallel
from trimtab.models.parallel.tensor_parallel import apply_tensor_parallel, supports_tensor_parallel
from trimtab.models.policy import Policy
from trimtab.models.recurrent import recurrent_modules
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
gemma4_unified_text git got_ocr2 llama4 minimax_m3_vl_text mllama moss_transcribe_diarize phi4_multimodal qwen3_5
qwen3_5_moe qwen4_exp
"""
NO_TINY = "cohere_compass_text cpmant dbrx zamba inkling_text ctrl"  # their configurations cannot be made this small
LEFT_OUT = set(f"{ENCODERS} {SEQ2SEQ} {OF_IMAGES_OR_BYTES} {NO_TINY}".split())
NAMES = sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - LEFT_OUT)

# Few heads have equal scores of 0, of which topk takes any.
INDEXED = {"index_topk": 4, "index_head_dim": 16, "index_n_heads": 16, "layer_types": ["indexed_attention"] * 2}
SPARSE = tiny.LATENT | tiny.ROUTED | INDEXED | {"mlp_layer_types": ["dense", "sparse"]}
WINDOWED = tiny.EXPERTS | {"head_dim": 8, "sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}
KNOWN = tiny.FAMILIES | tiny.LATENT_FAMILIES | tiny.VARIANT_FAMILIES | tiny.RECURRENT_FAMILIES | tiny.CYCLIC_FAMILIES
KNOWN |= {
    "axk1": tiny.LATENT | tiny.ROUTED,
    "axk2": tiny.LATENT | tiny.ROUTED | INDEXED,
    "bailing_hybrid": {key: size for key, size in tiny.LATENT.items() if key != "q_lora_rank"}
    | tiny.LINEAR
    | {"num_local_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 16}
    | {"mlp_layer_types": ["dense", "sparse"]},
    "beam": WINDOWED | {"n_group": 1, "topk_group": 1, "mlp_layer_types": ["dense", "sparse"]},
    "codegen": {"rotary_dim": 8},
    "deepseek_v32": SPARSE,
    "dots1": tiny.ROUTED | {"n_shared_experts": 1},
    "flint": WINDOWED | {"shared_expert_intermediate_size": 16, "mlp_only_layers": [0]},
    "glm_moe_dsa": SPARSE | {"indexer_types": ["full", "full"]},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "num_layers": 2, "num_heads": 4, "window_size": 5},
    "gptj": {"rotary_dim": 8, "n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 256},
    "hy_v4": SPARSE | {"indexer_types": ["full", "shared"], "head_dim": 8},
    "kolibri1": WINDOWED | {"shared_expert_intermediate_size": 16},
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


def tiny_config(name: str, **changes):
    kind, common = CONFIG_MAPPING[name], tiny.COMMON | changes
    own = KNOWN.get(name)
    if own is None:
        usual = kind()
        own = {key: value for key, value in USUAL.items() if hasattr(usual, key)}
    try:
        return kind(**common | own)
    except Exception:  # its list of layers has the usual length
        return kind(**common | own | {"layer_types": None})


def tiny_policy(name: str, **changes) -> Policy:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(name, **changes)).eval()
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


# ---- through the commands

CUT = "--train_batch_size 2 --micro_train_batch_size 2 --save_steps 1 --lr_warmup_ratio 0 --max_epochs 1"
SUPERVISED = f"--max_len 40 --learning_rate 1e-2 {CUT}"
REWARD = "--reward_verifier regex([0-4]):1.0,length(0-6):0.5"
RL = (
    f"--n_samples_per_prompt 2 --init_kl_coef 0.1 --label_key label --apply_chat_template {REWARD} --prompt_max_len 40 "
    f"--generate_max_len 6 --rollout_batch_size 1 --actor_learning_rate 3e-3 {CUT}"
)
JOBS = {
    "sft": f"sft --dataset {{data}}/rows.jsonl {SUPERVISED}",
    "dpo": f"dpo --dataset {{data}}/pairs.jsonl {SUPERVISED}",
    "rm": f"rm --dataset {{data}}/pairs.jsonl {SUPERVISED}",
    "grpo": f"grpo --prompt_data {{data}}/prompts.jsonl {RL}",
    "lora": f"grpo --prompt_data {{data}}/prompts.jsonl {RL} --lora_rank 2",
}
STEPS = 2


def write_data(folder: Path) -> None:
    write_rows(folder / "rows.jsonl", make_rows(2 * STEPS, 1))
    write_rows(folder / "pairs.jsonl", preference_rows(2 * STEPS, 1))
    write_rows(folder / "prompts.jsonl", make_prompts(STEPS, 1))


def write_family(name: str, folder: Path) -> None:
    tokenizer = make_tokenizer()
    changes = {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id}
    tiny_policy(name, **changes).inner.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def told(words: str) -> tuple[int, str]:
    """The exit code of `trimtab WORDS`, and what it said as an error."""
    out, error = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
        return command(words.split()), error.getvalue()


def train(name: str, folder: Path, data: Path) -> str:
    """Run every job for two steps, SFT and GRPO also from the checkpoint of the first one; returns the modules that
    adapters take: all, or those that PEFT allows."""
    write_family(name, folder / "model")
    adapted = "all"
    for job, words in JOBS.items():
        out = folder / job
        words = f"{words.format(data=data)} --pretrain {folder}/model --save_path {out} --ckpt_path {out}/checkpoints"
        code, error = told(words)
        if job == "lora" and "PEFT refuses it: Module 'out_proj' is incompatible with Mamba" in error:
            adapted = "named"
            code, error = told(f"{words} {error[error.index('--target_modules ', error.index('give')) :]}")
        assert code == 0, (job, error)
        metrics = rows(out)
        assert [row["step"] for row in metrics] == list(range(1, STEPS + 1))
        if job in ("grpo", "lora"):
            assert max(row["log_prob_gap"] for row in metrics) < 1e-6, metrics
        if job in ("sft", "grpo"):
            expected = weights(out)
            shutil.rmtree(out / "checkpoints" / f"global_step{STEPS}")
            for file in out.glob("*.safetensors"):
                file.unlink()
            assert told(f"{words} --load_checkpoint")[0] == 0 and rows(out) == metrics
            assert_same_tensors(weights(out), expected)
    return adapted


# ---- over two processes


def share_and_cut(names: list[str], file: Path) -> None:
    """What two processes do: log-probs and gradients of a row that they share, and of layers that they cut, are one
    process's. Writes the families for which it was possible."""
    world = find_world(find_device())
    ring, tensor = Mesh(world, context=2), Mesh(world, tensor=2)
    found: dict[str, tuple[bool, bool]] = {}
    for name in names:
        alone, batch = tiny_policy(name), batch_of(PACKED)
        shared, cut = (
            alone.path == "packed" and not alone.attention.not_shared,
            supports_tensor_parallel(alone.config, 2),
        )
        found[name] = shared, cut
        ways = [lambda root: setattr(root, "context", ContextParallel(ring.context, 1))] * shared
        ways += [lambda root: apply_tensor_parallel(root, tensor.for_tensor_parallel(copies=False))] * cut
        for split in ways:
            root = copy.deepcopy(alone)
            split(root)
            expected = alone(batch).log_probs_N
            close(root(batch).log_probs_N, expected, 1e-6, name)
            if root.context is not None:
                alone.zero_grad()
                expected.square().sum().backward()
                root(batch).log_probs_N.square().sum().backward()
                for (parameter, own), other in zip(root.named_parameters(), alone.parameters(), strict=True):
                    if other.grad is not None:
                        own = ring.context.sum(torch.zeros_like(other) if own.grad is None else own.grad)
                        off = (own - other.grad).abs().max()
                        assert off <= 1e-4 * other.grad.abs().max() + 1e-5, f"{name}: {parameter} is off by {off:.1e}"
    if world.rank == 0:
        file.write_text(json.dumps(found))
    leave_world()


def shared_and_cut(names: list[str]) -> dict[str, tuple[bool, bool]]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "found.json"
        assert warm.call_world(share_and_cut, 2, names, file) == [0, 0]
        return {name: tuple(both) for name, both in json.loads(file.read_text()).items()}


# ---- the table


@dataclass(frozen=True)
class Traits:
    """A row of the table."""

    rows: str
    engine: str
    fused: str
    lora: str
    tensor: str
    ring: str
    vllm: str


def traits_of(policy: Policy) -> dict[str, str]:
    """What a policy alone tells."""
    if policy.path != "packed":
        return {"rows": "padded", "engine": "no cache", "fused": "-"}
    states = bool(recurrent_modules(policy.inner))
    fused = is_llama_like(backbone_of(policy.inner))
    return {"rows": "packed", "engine": "states" if states else "pages", "fused": "yes" if fused else "-"}


def documented() -> dict[str, Traits]:
    """The table, by family."""
    found: dict[str, Traits] = {}
    for line in _TABLE.search(PAGE.read_text())[2].splitlines():
        names, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        found |= dict.fromkeys(re.findall("`(.*?)`", names), Traits(*cells))
    return found


_TABLE = re.compile(r"(\| families \|.*?\n\|[-|]+\n)(.*?)(?=\n\n)", re.DOTALL)


def main(names: list[str]) -> None:
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    tried = names or NAMES
    known = documented()
    found = {name: traits for name, traits in known.items() if name not in tried}
    split = shared_and_cut(tried)
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder)
        write_data(data)
        for name in tried:
            adapted = train(name, data / name, data)
            ring, tensor = ("yes" if possible else "-" for possible in split[name])
            listed = known[name].vllm if name in known else "-"  # tests/vllm/test_families.py asks vLLM
            found[name] = Traits(**traits_of(tiny_policy(name)), lora=adapted, tensor=tensor, ring=ring, vllm=listed)
            print(name, found[name], file=sys.stderr)
            shutil.rmtree(data / name)
    groups: dict[Traits, list[str]] = {}
    for quoted in sorted(f"`{name}`" for name in NAMES if name in found):
        groups.setdefault(found[quoted.strip("`")], []).append(quoted)
    largest_first = sorted(groups.items(), key=lambda item: -len(item[1]))
    lines = [f"| {' '.join(names)} | {' | '.join(asdict(traits).values())} |" for traits, names in largest_first]
    text = _TABLE.sub(lambda found: found[1] + "\n".join(lines), PAGE.read_text())
    PAGE.write_text(re.sub(r"\d+ causal families", f"{len(NAMES)} causal families", text))


if __name__ == "__main__":
    main(sys.argv[1:])
