import json

import pytest
import torch
from transformers import AutoTokenizer

from trimtab.embedded import sort_task
from trimtab.envs.chat_tokens import ChatAppender, MessageParser
from trimtab.envs.tools import tool_schema
from trimtab.evaluate.report_samples import answer


@pytest.fixture(scope="module")
def tokenizer():
    return sort_task.make_tokenizer()


@pytest.fixture(scope="module")
def model():
    return sort_task.make_model(seed=3)


def test_tokenizer_has_46_symbols_and_gives_text_back(tokenizer):
    text = "sort 493817>, ok?"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert len(tokenizer) == 46
    assert len(ids) == len(text)
    assert tokenizer.decode(ids) == text


def test_tokenizer_maps_what_it_does_not_know_to_one_unknown_token(tokenizer):
    assert tokenizer("a\né", add_special_tokens=False)["input_ids"][1:] == [tokenizer.unk_token_id] * 2


def test_chat_template_marks_exactly_the_answer_and_its_end(tokenizer):
    messages = [
        {"role": "user", "content": "sort 31>"},
        {"role": "assistant", "content": "13"},
        {"role": "user", "content": "sort 90>"},
        {"role": "assistant", "content": "09"},
    ]
    encoded = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    marked = [token for token, mask in zip(encoded["input_ids"], encoded["assistant_masks"]) if mask]
    assert tokenizer.decode(encoded["input_ids"]) == "<user>sort 31><assistant>13<eos><user>sort 90><assistant>09<eos>"
    assert tokenizer.decode(marked) == "13<eos>09<eos>"


def test_without_tools_a_conversation_is_its_texts_between_the_marks_of_turns(tokenizer):
    """The tokens that the quickstart trains on."""
    for row in [*sort_task.make_rows(200, seed=0), *sort_task.make_rows(50, seed=0, held_out=True)]:
        prompt, answer = sort_task.prompt_of(row), sort_task.reference_of(row)
        expected = ["<user>", *prompt, "<assistant>", *answer, "<eos>"]
        encoded = tokenizer.apply_chat_template(row["messages"], return_dict=True, return_assistant_tokens_mask=True)
        assert encoded["input_ids"] == tokenizer.convert_tokens_to_ids(expected)
        assert sum(encoded["assistant_masks"]) == len(answer) + 1


def pick(place: int, how: str = "left") -> str:
    """Pick a digit."""
    return f"{place} {how}"


@pytest.fixture
def loaded(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    return AutoTokenizer.from_pretrained(tmp_path)


@pytest.mark.parametrize("arguments", [{"place": 3}, {"place": 0, "how": "from 2.5 on"}, {"how": "12"}, {}])
def test_a_tool_call_is_written_in_the_model_s_characters_and_read_again(loaded, arguments):
    parsing = MessageParser(loaded, [tool_schema(pick)])
    text = parsing.written("pick", arguments)
    ids = loaded.encode(f"{text}<eos>", add_special_tokens=False)
    assert loaded.unk_token_id not in ids and len(ids) == len(text) + 1
    prompt = loaded.encode("<user>go><assistant>", add_special_tokens=False)
    message = parsing.message(ids, prompt, [loaded.eos_token_id])
    assert [call["function"] for call in message["tool_calls"]] == [{"name": "pick", "arguments": arguments}]


@pytest.mark.parametrize("text", ["134", "call ", "call pick", "call >", "recall"])
def test_what_is_no_tool_call_stays_text(loaded, text):
    parsing = MessageParser(loaded, [tool_schema(pick)])
    ids = loaded.encode(f"{text}<eos>", add_special_tokens=False)
    assert parsing.message(ids, loaded.encode("<assistant>"), [loaded.eos_token_id]).get("tool_calls") is None


def test_tools_and_their_results_are_appended_to_a_conversation(loaded):
    appending = ChatAppender(loaded, [tool_schema(pick)], [loaded.eos_token_id])  # which proves that it can be
    call = {"id": "call_0", "type": "function", "function": {"name": "pick", "arguments": {"place": 3}}}
    messages = [{"role": "user", "content": "go>"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    result = [{"role": "tool", "name": "pick", "tool_call_id": "call_0", "content": "7"}]
    opening, after = appending.opening(messages[:1]), appending.after(result, ended=True)
    assert loaded.decode(opening) == "<user>tools pick place how><user>go><assistant>"
    assert loaded.decode(after) == "<user>result 7><assistant>"
    whole = loaded.apply_chat_template([*messages, *result], tools=[tool_schema(pick)], add_generation_prompt=True)
    assert whole["input_ids"] == [*opening, *loaded.encode("call pick place 3><eos>"), *after]


def test_generation_prompt_is_the_beginning_of_the_whole_conversation(tokenizer):
    row = sort_task.make_rows(1, seed=0)[0]["messages"]
    prompt = tokenizer.apply_chat_template(row[:1], tokenize=False, add_generation_prompt=True)
    assert tokenizer.apply_chat_template(row, tokenize=False) == prompt + row[1]["content"] + tokenizer.eos_token


def test_model_is_drawn_from_its_seed_and_leaves_the_global_random_state(model):
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    again, other = sort_task.make_model(seed=3), sort_task.make_model(seed=4)
    assert torch.equal(torch.rand(3), expected)
    weights, repeated = model.state_dict(), again.state_dict()
    assert all(torch.equal(weights[name], repeated[name]) for name in weights)
    assert not torch.equal(weights["lm_head.weight"], other.state_dict()["lm_head.weight"])
    assert 850_000 < model.num_parameters() < 870_000


def test_rows_are_different_sorted_and_repeatable():
    rows = sort_task.make_rows(500, seed=1)
    assert rows == sort_task.make_rows(500, seed=1)
    assert rows != sort_task.make_rows(500, seed=2)
    assert len({sort_task.prompt_of(row) for row in rows}) == 500
    for row in rows:
        digits = sort_task.prompt_of(row).removeprefix("sort ").removesuffix(">")
        assert sort_task.SHORTEST <= len(digits) <= sort_task.LONGEST
        assert sort_task.reference_of(row) == "".join(sorted(digits))


def test_no_held_out_answer_occurs_in_training_whatever_the_seeds():
    trained = {sort_task.reference_of(row) for seed in range(3) for row in sort_task.make_rows(2000, seed)}
    held_out = {
        sort_task.reference_of(row) for seed in range(3) for row in sort_task.make_rows(300, seed, held_out=True)
    }
    assert held_out and not trained & held_out


def test_descending_share_is_the_share_of_descending_answers():
    rows = sort_task.make_rows(2000, seed=0, descending_share=0.65)
    answers = [sort_task.reference_of(row) for row in rows]
    descending = sum(text == "".join(sorted(text, reverse=True)) for text in answers) / len(answers)
    assert 0.60 < descending < 0.70


def last(row: dict, column: str) -> str:
    return row[column][-1]["content"]


@pytest.mark.parametrize("held_out", [False, True])
def test_pairs_prefer_the_ascending_order_to_another_one(held_out):
    rows = sort_task.make_pairs(400, seed=1, held_out=held_out)
    assert rows == sort_task.make_pairs(400, seed=1, held_out=held_out) != sort_task.make_pairs(400, 2, held_out)
    descending = 0
    for row in rows:
        right, wrong = last(row, "chosen"), last(row, "rejected")
        assert last(row, "prompt").startswith("sort ") and sort_task.is_held_out(right) == held_out
        assert right == "".join(sorted(right)) and sorted(wrong) == sorted(right) and wrong != right
        descending += wrong == right[::-1]
    assert 160 < descending < 260, "about one half, the others are shuffled"


def test_single_answers_are_labelled_by_what_they_are():
    rows = sort_task.make_unpaired(400, seed=1)
    for row in rows:
        digits = last(row, "prompt").removeprefix("sort ").removesuffix(">")
        assert (last(row, "completion") == "".join(sorted(digits))) == row["label"]
    assert 160 < sum(row["label"] for row in rows) < 240


def test_a_step_is_good_as_long_as_all_digits_so_far_are_right():
    rows = sort_task.make_steps(400, seed=1)
    for row in rows:
        digits = row["prompt"].removeprefix("<user>sort ").removesuffix("><assistant>")
        right, answer = "".join(sorted(digits)), "".join(row["completions"])
        assert len(row["labels"]) == len(answer) == len(right)
        assert row["labels"] == [right.startswith(answer[: i + 1]) for i in range(len(answer))]
    assert 160 < sum(all(row["labels"]) for row in rows) < 240


def test_the_marks_of_a_step_are_single_tokens(tokenizer):
    marks = (sort_task.STEP_END, sort_task.GOOD_STEP, sort_task.BAD_STEP)
    assert all(
        tokenizer.encode(mark) != [tokenizer.unk_token_id] and len(tokenizer.encode(mark)) == 1 for mark in marks
    )
    assert sort_task.STEP_END not in "".join(sort_task.make_steps(9, seed=1)[0]["completions"])


def test_success_counts_exact_answers_only():
    assert sort_task.success_rate(["12", "12 ", "21", "3"], ["12", "12", "12", "3"]) == 0.5


def test_write_gives_a_loadable_model_and_the_same_bytes_again(tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    sort_task.write(tmp_path, seed=7, train_rows=20, test_rows=5, judged_rows=9)
    files = [path for path in sorted(tmp_path.rglob("*")) if path.is_file()]
    first = {path: path.read_bytes() for path in files}
    sort_task.write(tmp_path, seed=7, train_rows=20, test_rows=5, judged_rows=9)
    assert {path: path.read_bytes() for path in files} == first

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert torch.equal(model.lm_head.weight, sort_task.make_model(7).lm_head.weight)
    assert tokenizer.chat_template == sort_task.CHAT_TEMPLATE
    assert model.config.eos_token_id == tokenizer.eos_token_id == model.generation_config.eos_token_id
    assert model.config.pad_token_id == tokenizer.pad_token_id
    for name, rows in {
        "train": sort_task.make_rows(20, seed=7),
        "test": sort_task.make_rows(5, seed=7, held_out=True),
        "pairs": sort_task.make_pairs(9, seed=7),
        "unpaired_test": sort_task.make_unpaired(5, seed=7, held_out=True),
        "steps": sort_task.make_steps(9, seed=7),
    }.items():
        assert [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()] == rows


def test_answers_do_not_depend_on_the_batch_and_keep_training_mode(tokenizer):
    model = sort_task.make_model(seed=3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(8)  # fresh weights say nearly the same to everything
    prompts = ["sort 5>", "sort 98765432>", "sort 12>"]
    model.train()
    together = answer(model, tokenizer, prompts, max_new_tokens=6)
    alone = [answer(model, tokenizer, [prompt], max_new_tokens=6)[0] for prompt in prompts]
    split = answer(model, tokenizer, prompts, max_new_tokens=6, batch_size=2)
    assert together == alone == split
    assert model.training
    assert len(set(together)) > 1, "answers that all agree would hide a wrong order"
    model.eval()
    assert answer(model, tokenizer, [], max_new_tokens=6) == []
    assert not model.training


def test_answer_is_the_argmax_of_the_models_own_logits(model, tokenizer):
    text = "<user>sort 5><assistant>"
    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        expected = tokenizer.decode(model(ids).logits[0, -1].argmax(), skip_special_tokens=True)
    assert answer(model, tokenizer, ["sort 5>"], max_new_tokens=1) == [expected]
