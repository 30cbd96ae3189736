"""A task small enough for a laptop: put the digits of a number in order.

    user       sort 493817>
    assistant  134789

Everything is made here from a seed: a character tokenizer of 46 symbols, a Llama of 0.86 million random parameters,
chat rows, prompts with the right answer, and rows that say which answers are good: pairs, single judged answers, and
answers judged step by step. A number is held out when a hash of its *sorted* digits says so, hence no held-out question
and no held-out answer ever occurs in training, whatever the counts and seeds.

What it leaves out: it says nothing about language. It is there to see a model learn within a minute.
"""

from __future__ import annotations

import json
import random
import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers.decoders import Decoder
    from tokenizers.pre_tokenizers import PreTokenizer
    from transformers import LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast

SPECIAL_TOKENS = ("<pad>", "<eos>", "<unk>", "<user>", "<assistant>")
CHARACTERS = "abcdefghijklmnopqrstuvwxyz0123456789 >.,?"
CHAT_TEMPLATE = (
    "{%- if tools -%}<user>tools{% for tool in tools %}{{ ',' if not loop.first }} {{ tool.function.name }}"
    "{% for name in tool.function.parameters.properties %} {{ name }}{% endfor %}{% endfor %}>{%- endif -%}"
    "{%- for message in messages -%}"
    "{%- if message['role'] == 'user' -%}<user>{{ message['content'] }}"
    "{%- elif message['role'] == 'tool' -%}<user>result {{ message['content'] }}>"
    "{%- elif message['role'] == 'assistant' -%}"
    "<assistant>{% generation %}{{ message['content'] or '' }}"
    "{%- for call in message['tool_calls'] or [] -%}call {{ call.function.name }}"
    "{%- for name, value in call.function.arguments.items() -%}"
    "{{ ' ' if loop.first else ', ' }}{{ name }} {{ value if value is string else value | tojson }}"
    "{%- endfor -%}>{%- endfor -%}"
    "<eos>{% endgeneration %}"
    "{%- else -%}{{ raise_exception('this model knows only user, assistant and tool turns, not ' + message['role']) }}"
    "{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}<assistant>{%- endif -%}"
)
RESPONSE_TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<assistant>",
    "fields": {
        "tool_calls": {
            "open_pattern": r"call (?P<name>[a-z0-9]+)(?: |(?=>))",
            "close_pattern": r">",
            "repeats": True,
            "content": "xml-inline",
            "content_args": {"tag_pattern": r"(?P<key>[a-z0-9]+) (?P<value>[^,]*)(?:, |$)"},
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": {"close_pattern": r"<eos>", "content": "text"},
    },
}
"""How the model calls tools, in its few characters: `call NAME PARAMETER VALUE, PARAMETER VALUE>`."""

SHORTEST, LONGEST = 5, 8

# One pass over these rows in steps of 64 is the recipe that works: 300 steps at a peak learning rate of 2e-3.
TRAIN_ROWS = 19_200
TEST_ROWS = 256
JUDGED_ROWS = 4_096  # of each kind: prompts, pairs, single answers, steps

# A judged step is a digit of the answer and the token that ends it; these stand for its labels.
STEP_END, GOOD_STEP, BAD_STEP = ".", "y", "n"


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character; special tokens mark turns, the end and padding."""
    from tokenizers import Regex, decoders, pre_tokenizers

    return word_tokenizer(
        [*SPECIAL_TOKENS, *CHARACTERS],
        pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated"),
        decoders.Fuse(),
        additional_special_tokens=["<user>", "<assistant>"],
        chat_template=CHAT_TEMPLATE,
        response_template=RESPONSE_TEMPLATE,
        model_max_length=256,
        clean_up_tokenization_spaces=False,
    )


def make_model(seed: int = 0) -> LlamaForCausalLM:
    """A Llama with random weights drawn from `seed`; the caller's random state is left as it was."""
    words = [*SPECIAL_TOKENS, *CHARACTERS]
    return word_llama(words, seed, width=128, inner=384, layers=4, positions=256).eval()


def is_held_out(digits: str) -> bool:
    """A tenth of all digit multisets belong to the held-out set."""
    return zlib.crc32("".join(sorted(digits)).encode()) % 10 == 0


def make_rows(count: int, seed: int, descending_share: float = 0.0, held_out: bool = False) -> list[dict]:
    """`count` different conversations; a share of them answers in descending order, as a habit for RL to unlearn."""
    generator = random.Random(f"sort task {seed} {'held out' if held_out else 'train'}")
    seen: set[str] = set()
    rows: list[dict] = []
    while len(rows) < count:
        length = generator.randint(SHORTEST, LONGEST)
        digits = "".join(generator.choice("0123456789") for _ in range(length))
        if digits in seen or len(set(digits)) == 1 or is_held_out(digits) != held_out:
            continue
        seen.add(digits)
        descending = generator.random() < descending_share
        rows.append(
            {
                "messages": [
                    {"role": "user", "content": f"sort {digits}>"},
                    {"role": "assistant", "content": "".join(sorted(digits, reverse=descending))},
                ]
            }
        )
    return rows


def make_prompts(count: int, seed: int, held_out: bool = False) -> list[dict]:
    """A question and, as its label, the right answer: for a reward to compare answers with."""
    rows = make_rows(count, seed, held_out=held_out)
    return [{"input": row["messages"][:1], "label": reference_of(row)} for row in rows]


def make_pairs(count: int, seed: int, held_out: bool = False) -> list[dict]:
    """A question, the right answer, and one that is as long: in descending order or shuffled."""
    generator = random.Random(f"sort task pairs {seed}")
    return [
        {"prompt": row["messages"][:1], "chosen": row["messages"][1:], "rejected": [_assistant(wrong)]}
        for row, wrong in _with_wrong_answers(count, seed, held_out, generator)
    ]


def make_unpaired(count: int, seed: int, held_out: bool = False) -> list[dict]:
    """A question, an answer, and whether it is right; one half of the answers are."""
    generator = random.Random(f"sort task unpaired {seed}")
    rows = []
    for row, wrong in _with_wrong_answers(count, seed, held_out, generator):
        right = generator.random() < 0.5
        answer = row["messages"][1:] if right else [_assistant(wrong)]
        rows.append({"prompt": row["messages"][:1], "completion": answer, "label": right})
    return rows


def make_steps(count: int, seed: int, held_out: bool = False) -> list[dict]:
    """A question, its answer digit by digit, and of each digit whether all is right so far; one half are to the end."""
    generator = random.Random(f"sort task steps {seed}")
    rows = []
    for row, wrong in _with_wrong_answers(count, seed, held_out, generator):
        right = reference_of(row)
        answer = right if generator.random() < 0.5 else wrong
        labels = [answer[: i + 1] == right[: i + 1] for i in range(len(answer))]
        rows.append({"prompt": f"<user>{prompt_of(row)}<assistant>", "completions": list(answer), "labels": labels})
    return rows


def _with_wrong_answers(count: int, seed: int, held_out: bool, generator: random.Random) -> Iterator[tuple[dict, str]]:
    for row in make_rows(count, seed, held_out=held_out):
        right = reference_of(row)
        wrong = right[::-1]
        if generator.random() < 0.5:
            wrong = "".join(generator.sample(right, len(right)))
        if wrong == right:  # no row is about one digit repeated, which has no wrong order
            wrong = right[1:] + right[:1]
        yield row, wrong


def _assistant(text: str) -> dict:
    return {"role": "assistant", "content": text}


def prompt_of(row: dict) -> str:
    return row["messages"][0]["content"]


def reference_of(row: dict) -> str:
    return row["messages"][-1]["content"]


def success_rate(answers: Sequence[str], references: Sequence[str]) -> float:
    """Share of answers that are exactly right."""
    assert len(answers) == len(references) > 0
    return sum(answer == reference for answer, reference in zip(answers, references)) / len(answers)


def write(
    folder: str | Path,
    seed: int = 0,
    train_rows: int = TRAIN_ROWS,
    test_rows: int = TEST_ROWS,
    descending_share: float = 0.0,
    judged_rows: int = JUDGED_ROWS,
) -> Path:
    """Write `model/`, `train.jsonl`, `test.jsonl` and the judged rows into `folder`; the test rows always ascend."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    write_model(folder / "model", make_model(seed), make_tokenizer())
    write_rows(folder / "train.jsonl", make_rows(train_rows, seed, descending_share))
    write_rows(folder / "test.jsonl", make_rows(test_rows, seed, held_out=True))
    kinds = {"prompts": make_prompts, "pairs": make_pairs, "unpaired": make_unpaired, "steps": make_steps}
    for name, make in kinds.items():
        write_rows(folder / f"{name}.jsonl", make(judged_rows, seed))
        write_rows(folder / f"{name}_test.jsonl", make(test_rows, seed, held_out=True))
    return folder


# ---- what all embedded tasks are made of: a tokenizer of listed words, a small Llama for it, and files


def word_tokenizer(
    words: Sequence[str], cut: PreTokenizer, joined: Decoder, *, unknown: str = "<unk>", **settings: Any
) -> PreTrainedTokenizerFast:
    """A tokenizer whose tokens are `words`, with "<pad>" and "<eos>" among them. `cut` splits a text into words,
    `joined` makes a text of them."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token=unknown))
    core.pre_tokenizer, core.decoder = cut, joined
    return PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", eos_token="<eos>", unk_token=unknown, **settings
    )


def phrase_tokenizer(words: Sequence[str], phrases: Sequence[str], **settings: Any) -> PreTrainedTokenizerFast:
    """A tokenizer with one token a phrase; other text is unknown."""
    from tokenizers import Regex, decoders, pre_tokenizers

    cut = pre_tokenizers.Split(Regex("|".join(map(re.escape, phrases))), behavior="isolated")
    return word_tokenizer(words, cut, decoders.Fuse(), clean_up_tokenization_spaces=False, **settings)


def word_llama(
    words: Sequence[str],
    seed: int,
    *,
    width: int,
    inner: int,
    layers: int,
    positions: int,
    heads: int = 4,
    spread: float = 0.0,
    **settings: Any,
) -> LlamaForCausalLM:
    """A Llama with random weights drawn from `seed`, its matrices with the deviation `spread` if that is not 0. The
    caller's random state is left as it was."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=len(words),
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        max_position_embeddings=positions,
        pad_token_id=words.index("<pad>"),
        eos_token_id=words.index("<eos>"),
        bos_token_id=None,
        **settings,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
        with torch.no_grad():
            for parameter in model.parameters():
                if spread and parameter.ndim >= 2:
                    parameter.normal_(0, spread)
    return model


def teach_bigrams(
    model: LlamaForCausalLM, words: Sequence[str], follows: Iterable[tuple[str, str]], logit: float
) -> None:
    """Give every (word, next word) of `follows` this logit; all other next words keep about 0."""
    import torch

    with torch.no_grad():
        # Each word becomes a direction, which the norm before the head scales to the root of the width.
        embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
        embedding += torch.eye(*embedding.shape)
        for before, after in follows:
            head[words.index(after), words.index(before)] += logit / model.config.hidden_size**0.5


def write_model(folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Write a model and its tokenizer into `folder`, which is made."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def write_rows(path: Path, rows: Iterable[dict]) -> None:
    """Write rows as JSON lines."""
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
