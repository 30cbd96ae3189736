import json

import pytest

from tests.data.templates import CHATML
from trimtab.data.tokenizer import load_tokenizer, texts_of
from trimtab.errors import UserError


def test_a_saved_tokenizer_is_loaded_and_pads_with_eos_without_growing(make_tokenizer, tmp_path):
    saved = make_tokenizer(CHATML)
    saved.pad_token = None
    saved.save_pretrained(tmp_path / "model")
    tokenizer = load_tokenizer(str(tmp_path / "model"))
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == saved.eos_token_id
    assert len(tokenizer) == len(saved)
    assert tokenizer.chat_template == CHATML


def test_a_pad_token_of_its_own_is_kept(make_tokenizer, tmp_path):
    make_tokenizer().save_pretrained(tmp_path / "model")
    assert load_tokenizer(str(tmp_path / "model")).pad_token == "<pad>"


def test_the_chat_template_may_be_text_or_a_file(make_tokenizer, tmp_path):
    make_tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "template.jinja").write_text(CHATML)
    for given in (CHATML, str(tmp_path / "template.jinja")):
        assert load_tokenizer(str(tmp_path / "model"), chat_template=given).chat_template == CHATML
    with pytest.raises(UserError, match="--tokenizer_chat_template"):
        load_tokenizer(str(tmp_path / "model"), chat_template="missing.jinja")


def test_missing_models_are_one_line(tmp_path):
    for name, words in (
        (str(tmp_path / "nowhere"), "cannot find the model folder"),
        ("org/name", "the hub cannot be reached"),
        (str(tmp_path), "no tokenizer"),
    ):
        with pytest.raises(UserError, match=words) as caught:
            load_tokenizer(name)
        assert "\n" not in str(caught.value)


def test_a_config_that_transformers_refuses_is_told_by_its_fault(make_tokenizer, tmp_path):
    make_tokenizer().save_pretrained(tmp_path)
    config = {"model_type": "qwen3_5_text", "num_hidden_layers": 2, "layer_types": ["full_attention", "mystery"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"config.json: layer_types has mystery, which version .* does not know"):
        load_tokenizer(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps(config | {"layer_types": ["full_attention"]}))
    with pytest.raises(UserError, match=r"config.json: .*`num_hidden_layers` \(2\) must be equal to the number of"):
        load_tokenizer(str(tmp_path))


def test_a_tokenizer_without_an_end_is_refused(make_tokenizer, tmp_path):
    saved = make_tokenizer()
    saved.eos_token = saved.pad_token = None
    saved.save_pretrained(tmp_path / "model")
    with pytest.raises(UserError, match="neither a pad nor an EOS"):
        load_tokenizer(str(tmp_path / "model"))


@pytest.mark.parametrize("cleaned", [False, True])
def test_texts_are_those_that_the_tokenizer_decodes_one_by_one(make_tokenizer, cleaned):
    tokenizer = make_tokenizer(CHATML)
    tokenizer.clean_up_tokenization_spaces = cleaned
    ids = [tokenizer.encode(text) for text in ("one , two", "", "it 's three .", "four")]
    ids[0].append(tokenizer.eos_token_id)
    assert texts_of(tokenizer, ids) == [tokenizer.decode(part, skip_special_tokens=True) for part in ids]


@pytest.mark.parametrize("name", ["decode", "batch_decode", "_decode"])
def test_a_tokenizer_with_its_own_way_to_decode_is_asked(make_tokenizer, name, monkeypatch):
    tokenizer = make_tokenizer()

    class Own(type(tokenizer)):
        pass

    inherited, asked = getattr(Own, name), []
    setattr(Own, name, lambda *given, **named: asked.append(name) or inherited(*given, **named))
    tokenizer.__class__ = Own
    assert texts_of(tokenizer, [tokenizer.encode("one")]) == ["one"]
    assert asked
