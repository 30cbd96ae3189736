import pickle

import numpy as np
import pytest
from datasets import Dataset

from tests.data.rows import chosen, talk, write_jsonl
from tests.data.templates import CHATML
from trimtab.data import prompts
from trimtab.data.prompts import PromptRenderer, PromptSettings, build_prompt_dataset, load_prompt_datasets
from trimtab.errors import UserError


def build(tokenizer, *rows, **changes):
    return build_prompt_dataset(Dataset.from_list(list(rows)), tokenizer, chosen(**changes))


def load(tokenizer, prompt_data, **changes):
    return load_prompt_datasets(chosen(prompt_data=str(prompt_data), **changes), tokenizer)


def test_a_plain_string_is_the_prompt_itself(make_tokenizer):
    tokenizer = make_tokenizer(CHATML)
    store, report = build(tokenizer, {"input": "hello é"}, {"input": "The quick fox"})
    assert [store.text(i) for i in range(len(store))] == ["hello é", "The quick fox"]
    assert [tokenizer.decode(store.ids(i)) for i in range(2)] == ["hello é", "The quick fox"]
    assert store.lengths.tolist() == [len(store.ids(0)), len(store.ids(1))]
    assert store.largest_token == max(store.ids(0) + store.ids(1))
    assert store.label(0) is None and store.columns(0) == {}
    assert report.rows_kept == 2 and report.tokens == store.lengths.sum()


def test_an_input_template_goes_around_strings_and_its_other_braces_stay(make_tokenizer):
    store, _ = build(make_tokenizer(), {"input": "a {} b"}, input_template="{x} User: {}\nAssistant:")
    assert store.text(0) == "{x} User: a {} b\nAssistant:"


@pytest.mark.parametrize("value", ["hello", talk("hello"), [{"from": "human", "value": "hello"}]])
def test_strings_and_conversations_end_where_the_assistant_is_to_speak(make_tokenizer, value):
    tokenizer = make_tokenizer(CHATML)
    store, _ = build(tokenizer, {"input": value}, apply_chat_template=True, input_template="not used {}")
    expected = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert store.text(0) == expected
    assert store.ids(0) == tokenizer(expected, add_special_tokens=False)["input_ids"]


def test_a_conversation_is_rendered_without_being_told(make_tokenizer):
    store, _ = build(make_tokenizer(CHATML), {"input": talk("hello", "yes", "four?")})
    assert store.text(0).endswith("yes<|im_end|>\n<|im_start|>user\nfour?<|im_end|>\n<|im_start|>assistant\n")


def test_a_conversation_that_already_has_its_answer_is_refused_with_its_row(make_tokenizer):
    answered = talk("q", "a")
    with pytest.raises(UserError, match=r"^row 2 of the train data: column 'input' ends with the assistant's turn"):
        build(make_tokenizer(CHATML), {"input": answered[:1]}, {"input": answered})


def test_longer_prompts_are_left_out_and_counted_and_the_rest_keep_their_rows(make_tokenizer):
    tokenizer = make_tokenizer()
    rows = [{"input": "hello " * n, "answer": n} for n in (1, 50, 2, 60, 0, 3)]
    longest = len(tokenizer("hello " * 3)["input_ids"])
    store, report = build(tokenizer, *rows, label_key="answer", prompt_max_len=longest)
    assert [store.label(i) for i in range(len(store))] == [1, 2, 3]
    assert [store.text(i).count("hello") for i in range(len(store))] == [1, 2, 3]
    assert store.lengths.max() == longest
    assert (report.rows_read, report.rows_kept, report.rows_over_long, report.rows_empty) == (6, 3, 2, 1)
    assert report.rows_truncated == 0
    lines = report.lines()
    assert lines[0].startswith("train data: 3 of 6 prompts (column input), ")
    assert f"2 prompts left out: more than {longest} tokens (--prompt_max_len)" in lines
    assert "1 prompts left out: empty" in lines


def test_longer_prompts_are_cut_where_that_is_asked_for_and_keep_their_first_tokens(make_tokenizer):
    tokenizer = make_tokenizer()
    rows = [{"input": f"{n} " + "hello " * n} for n in (1, 50, 2)]
    longest = len(tokenizer(rows[2]["input"])["input_ids"])
    store, report = build(tokenizer, *rows, prompt_max_len=longest, truncate_prompts=True)
    assert store.ids(1) == tokenizer(rows[1]["input"])["input_ids"][:longest]
    assert store.text(1) == tokenizer.decode(store.ids(1)) and rows[1]["input"].startswith(store.text(1))
    assert [store.text(i) for i in (0, 2)] == [rows[0]["input"], rows[2]["input"]]
    assert (report.rows_kept, report.rows_truncated, report.rows_over_long) == (3, 1, 0)
    assert f"1 prompts cut to their first {longest} tokens (--truncate_prompts): they lack their end" in report.lines()


@pytest.mark.parametrize("as_list", [True, False])
def test_prompts_and_labels_of_paddlenlp_are_texts_or_lists_of_one(make_tokenizer, as_list):
    rows = [{"src": "hello", "tgt": "a"}, {"src": "The quick fox", "tgt": "b"}]
    held = [{name: [text] for name, text in row.items()} for row in rows] if as_list else rows
    store, report = build(make_tokenizer(CHATML), *held, input_key="src", label_key="tgt")
    assert [store.text(i) for i in range(2)] == [store.prompt(i) for i in range(2)] == ["hello", "The quick fox"]
    assert [store.label(i) for i in range(2)] == ["a", "b"]
    assert report.template_unused, "they reach the model as they stand"


def test_a_label_in_a_list_stays_one_where_the_rows_are_not_paddlenlps(make_tokenizer):
    store, _ = build(make_tokenizer(), {"input": "hello", "gold": ["a"]}, label_key="gold")
    assert store.label(0) == ["a"]
    with pytest.raises(UserError, match=r"^row 1 of the train data: message 1 of column 'src' is a string"):
        build(make_tokenizer(), {"src": ["hello", "again"]}, input_key="src")


def test_no_prompt_left_is_one_line(make_tokenizer):
    with pytest.raises(UserError, match=r"of 2, 1 have more than 4 tokens \(raise --prompt_max_len\), 1 are empty"):
        build(make_tokenizer(), {"input": "hello " * 9}, {"input": ""}, prompt_max_len=4)


@pytest.mark.parametrize(
    "changes, complaint",
    [
        ({"input_key": "question"}, r"no column 'question' \(--input_key\) in the data: found text, answer"),
        ({}, r"no column 'input' \(--input_key\) in the data: found text, answer"),
        ({"input_key": "text", "label_key": "gold"}, r"no column 'gold' \(--label_key\) in the data: found text"),
        ({"input_key": "answer"}, "row 1 of the train data: column 'answer' holds a number"),
    ],
)
def test_columns_that_are_not_there_or_hold_something_else_are_one_line(make_tokenizer, changes, complaint):
    with pytest.raises(UserError, match=f"^{complaint}"):
        build(make_tokenizer(), {"text": "hello", "answer": 4}, **changes)


def test_a_column_called_prompt_needs_no_option(make_tokenizer):
    store, _ = build(make_tokenizer(), {"prompt": "hello", "id": 7})
    assert store.text(0) == "hello" and store.columns(0) == {"id": 7}


def test_labels_and_other_columns_are_what_the_rows_hold(make_tokenizer):
    rows = [
        {"q": "hello", "gold": {"names": ["a", "b"], "n": 2}, "level": 3, "note": None},
        {"q": "fox", "gold": {"names": [], "n": 0}, "level": 1, "note": "x"},
    ]
    store, _ = build(make_tokenizer(), *rows, input_key="q", label_key="gold")
    assert [store.label(i) for i in range(2)] == [row["gold"] for row in rows]
    assert [store.columns(i) for i in range(2)] == [{k: v for k, v in row.items() if k != "q"} for row in rows]


def test_a_prompt_that_is_not_there_is_an_index_error(make_tokenizer):
    store, _ = build(make_tokenizer(), {"input": "hello"})
    for index in (1, -1):
        with pytest.raises(IndexError):
            store.ids(index)
        with pytest.raises(IndexError):
            store.text(index)


def test_sources_are_the_rows_own_word_or_the_name_of_the_file(make_tokenizer, tmp_path):
    one = write_jsonl(tmp_path / "one.jsonl", [{"input": "a", "datasource": "maths"}, {"input": "b"}])
    two = write_jsonl(tmp_path / "two.jsonl", [{"input": "c", "data_source": "logic"}, {"input": "d"}])
    stores, _ = load(make_tokenizer(), f"{one},{two}")
    store = stores["train"]
    found = {store.text(i): store.source(i) for i in range(4)}
    assert found == {"a": "maths", "b": "one.jsonl", "c": "logic", "d": "two.jsonl"}
    assert store.columns(0) == {"datasource": "maths", "data_source": None}


def test_evaluation_prompts_come_from_their_own_data_and_are_absent_without_them(make_tokenizer, tmp_path):
    train = write_jsonl(tmp_path / "train.jsonl", [{"input": "a"}, {"input": "b"}])
    held_out = write_jsonl(tmp_path / "held_out.jsonl", [{"input": "c"}])
    stores, reports = load(make_tokenizer(), train, eval_dataset=str(held_out))
    assert stores["evaluation"].text(0) == "c" and stores["evaluation"].source(0) == "held_out.jsonl"
    assert reports["evaluation"].lines()[0].startswith("evaluation data: 1 of 1 prompts")
    assert load(make_tokenizer(), train)[0].keys() == {"train"}


def test_mixtures_splits_and_limits_are_those_of_the_options(make_tokenizer, tmp_path):
    one = write_jsonl(tmp_path / "one.jsonl", ({"input": f"one {n}"} for n in range(200)))
    two = write_jsonl(tmp_path / "two.jsonl", ({"input": f"two {n}"} for n in range(200)))
    tokenizer = make_tokenizer()
    stores, _ = load(tokenizer, f"{one},{two}", prompt_data_probs="0.9,0.1", max_samples=100)
    sources = [stores["train"].source(i) for i in range(len(stores["train"]))]
    assert len(sources) == 100 and 75 < sources.count("one.jsonl") < 100
    assert len(load(tokenizer, one, prompt_split="train[:10%]")[0]["train"]) == 20
    with pytest.raises(UserError, match=r"--prompt_data_probs"):
        load(tokenizer, one, prompt_data_probs="0.5,0.5")
    with pytest.raises(UserError, match=r"has no split 'dev'.*\(see --prompt_split\)"):
        load(tokenizer, one, prompt_split="dev")
    with pytest.raises(UserError, match=r"has no split 'dev'.*\(see --eval_split\)"):
        load(tokenizer, one, eval_dataset=str(two), eval_split="dev")


def test_the_cache_gives_the_same_store_without_rendering_again(make_tokenizer, tmp_path, monkeypatch):
    rows = [{"input": "hello é " * n, "gold": n} for n in (1, 40, 2)]
    changes = {"label_key": "gold", "prompt_max_len": 20}
    first, report = build(make_tokenizer(), *rows, **changes)

    def never(self, row, where):
        raise AssertionError("rendered again")

    monkeypatch.setattr(PromptRenderer, "render", never)
    again, report_again = build(make_tokenizer(), *rows, **changes)
    assert [again.text(i) for i in range(2)] == [first.text(i) for i in range(2)]
    assert [again.ids(i) for i in range(2)] == [first.ids(i) for i in range(2)]
    assert [again.label(i) for i in range(2)] == [1, 2]
    assert again.fingerprint == first.fingerprint and report_again == report
    with pytest.raises(AssertionError, match="rendered again"):
        build(make_tokenizer(), *rows, **changes, input_template="User: {}")


def test_the_fingerprint_follows_prompts_labels_and_columns_and_not_the_files_name(make_tokenizer, tmp_path):
    tokenizer = make_tokenizer()
    row = {"input": "hello", "gold": "4", "level": 1}
    changed = [row, {**row, "input": "fox"}, {**row, "gold": "5"}, {**row, "level": 2}]
    stores = [build(tokenizer, one, label_key="gold")[0] for one in changed]
    assert len({store.fingerprint for store in stores}) == 4
    files = [write_jsonl(tmp_path / name, [row]) for name in ("one.jsonl", "two.jsonl")]
    assert len({load(tokenizer, file)[0]["train"].fingerprint for file in files}) == 1


def test_a_worker_process_renders_the_same(make_tokenizer):
    settings = PromptSettings("input", None, True, 64)
    renderer = PromptRenderer("input", ["input", "tools"], make_tokenizer(CHATML), settings, "train")
    row = {"input": "hello", "tools": None}
    assert pickle.loads(pickle.dumps(renderer)).render(row, "row 1") == renderer.render(row, "row 1")


def test_a_slow_tokenizer_gives_prompts_too(make_tokenizer, monkeypatch):
    tokenizer = make_tokenizer()
    monkeypatch.setattr(type(tokenizer), "is_fast", False)
    store, _ = build(tokenizer, {"input": "hello fox"})
    assert store.ids(0) == tokenizer.encode("hello fox", add_special_tokens=False)
    assert isinstance(store.ids(0)[0], int) and store.lengths.dtype == np.int64
    assert prompts.SOURCE_COLUMN not in store.columns(0)


def test_the_limit_of_training_rows_leaves_evaluation_alone(tmp_path, make_tokenizer):
    rows = [{"input": str(number)} for number in range(9)]
    train, test = (write_jsonl(tmp_path / name, rows) for name in ("a.jsonl", "b.jsonl"))
    stores, reports = load(make_tokenizer(), train, eval_dataset=str(test), max_samples=4)
    assert (len(stores["train"]), len(stores["evaluation"])) == (4, 9)
    assert reports["train"].lines()[0].startswith("train data: 4 of 9 prompts")
    assert "5 prompts left out: beyond --max_samples 4" in reports["train"].lines()
    stores, reports = load(make_tokenizer(), train, eval_dataset=str(test), eval_max_samples=3)
    assert (len(stores["train"]), len(stores["evaluation"])) == (9, 3)
    assert "6 prompts left out: beyond --eval_max_samples 3" in reports["evaluation"].lines()


def test_text_prompts_that_pass_by_a_chat_template_are_told(tmp_path, make_tokenizer):
    texts = write_jsonl(tmp_path / "a.jsonl", [{"input": "hello"}])
    talks = write_jsonl(tmp_path / "b.jsonl", [{"input": talk("hello")}])

    def told(path, template=CHATML, **changes):
        return "--apply_chat_template" in "".join(load(make_tokenizer(template), path, **changes)[1]["train"].lines())

    assert told(texts) and told(texts)  # made, and from the cache
    assert not told(texts, apply_chat_template=True) and not told(texts, input_template="Q: {}")
    assert not told(texts, template=None) and not told(talks)
