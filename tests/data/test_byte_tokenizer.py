from trimtab.data.tokenizer import END, byte_tokenizer


def test_whatever_is_written_comes_back_and_the_end_is_one_token():
    tokenizer = byte_tokenizer("{{ messages }}")
    for text in ("", "a  b\n\t", "Grüße, 世界 🙂", "\x00\x7f", " <|end|"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
        assert len(tokenizer.encode(text)) == len(text.encode())
    assert tokenizer.encode(f"a{END}") == [*tokenizer.encode("a"), tokenizer.eos_token_id]
    assert len(tokenizer) == 257
