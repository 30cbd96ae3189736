"""What the recipes in examples/ run on in their tiny mode: models of a few thousand random weights and a few rows.

The rows are the sort task's, in the columns of the data sets that the recipes name, so that a recipe's options are
used as they stand. Nothing is learnt here but that a command works.

    python -m trimtab.embedded.tiny_recipes FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path

from trimtab.data.tokenizer import END, byte_tokenizer
from trimtab.embedded.sort_task import make_rows, make_tokenizer, prompt_of, reference_of, write_model, write_rows

STEP_END, GOOD, BAD = "ки", "+", "-"  # the step and label tokens of Math-Shepherd
ROWS = 64
AGENT_TEMPLATE = (
    "{%- if tools -%}system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor -%}" + END + "{%- endif -%}"
    "{%- for message in messages -%}{{ message.role }}\n{{ message.content or '' }}"
    "{%- for call in message.tool_calls or [] -%}<tool_call>{{ call.function | tojson }}</tool_call>{%- endfor -%}"
    + END
    + "{%- endfor -%}{%- if add_generation_prompt -%}assistant\n{% endif -%}"
)


def write(folder: str | Path, rows: int = ROWS) -> Path:
    """Write the models `llama`, `mixtral`, `teacher`, `reward` and `agent`, whose tokens are bytes, and one
    data file a kind of job, into `folder`."""
    folder = Path(folder)
    tokenizer = make_tokenizer()
    tokenizer.add_tokens([STEP_END, GOOD, BAD])
    for name, model in (
        ("llama", make_model("llama", len(tokenizer))),
        ("mixtral", make_model("mixtral", len(tokenizer), num_local_experts=4, num_experts_per_tok=2)),
        ("teacher", make_model("llama", len(tokenizer), seed=1, hidden_size=64)),
        ("reward", make_model("llama", len(tokenizer), num_labels=1, mean=0.0, std=1.0)),
    ):
        write_model(folder / name, model, tokenizer)
    speaker = byte_tokenizer(AGENT_TEMPLATE)
    end = speaker.eos_token_id
    agent = make_model("llama", len(speaker), max_position_embeddings=1024, eos_token_id=end, pad_token_id=end)
    write_model(folder / "agent", agent, speaker)
    pairs = [(prompt_of(row), reference_of(row)) for row in make_rows(rows, seed=0)]
    for name, make in (
        ("questions", question),
        ("preferences", preference),
        ("judged_answers", judged_answer),
        ("judged_steps", judged_steps),
        ("prompts", prompt),
    ):
        write_rows(folder / f"{name}.jsonl", (make(index, *pair) for index, pair in enumerate(pairs)))
    return folder


def make_model(family: str, vocabulary: int, seed: int = 0, **changes):
    """A causal LM of this family, or with `num_labels` a sequence classifier, with random weights; the caller's random
    state is left as it was."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

    kind = AutoModelForSequenceClassification if "num_labels" in changes else AutoModelForCausalLM
    sizes = {
        "vocab_size": vocabulary,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": None,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return kind.from_config(AutoConfig.for_model(family, **sizes | changes))


def question(index: int, prompt: str, answer: str) -> dict:
    return {"question": prompt, "response": answer}


def preference(index: int, prompt: str, answer: str) -> dict:
    """Two whole conversations: in the rejected one the order is the wrong way round."""
    return {"chosen": _conversation(prompt, answer), "rejected": _conversation(prompt, answer[::-1])}


def judged_answer(index: int, prompt: str, answer: str) -> dict:
    good = index % 3 != 0
    return {"instruction": prompt, "response": answer if good else answer[::-1], "score": int(good)}


def judged_steps(index: int, prompt: str, answer: str) -> dict:
    """One digit a step; in every other row one step is wrong."""
    digits = list(answer[:4])
    if index % 2:
        digits[-1] = str((int(digits[-1]) + 1) % 10)
    labels = [GOOD if digit == right else BAD for digit, right in zip(digits, answer)]
    return {"input": prompt + "".join(f" {digit} {STEP_END}" for digit in digits), "value": labels}


def prompt(index: int, prompt: str, answer: str) -> dict:
    """A question for RL, as a conversation and as text, and the right answer."""
    return {"context_messages": [{"role": "user", "content": prompt}], "problem": prompt, "answer": answer}


def _conversation(prompt: str, answer: str) -> list[dict]:
    return [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]


if __name__ == "__main__":
    write(sys.argv[1])
