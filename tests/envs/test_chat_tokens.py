from pathlib import Path

import pytest

from tests.data.templates import CHATML, GEMMA, INLINE_TOOLS, LLAMA3, MISTRAL, QWEN3, THINKING_PROMPT, TWO_ENDS, WORDS
from tests.envs.chat_templates import ADD, tokenizer_of
from trimtab.envs.chat_tokens import ChatAppender, TextAppender, tokens_after
from trimtab.errors import UserError

USER = {"role": "user", "content": "And the next one?"}
TOOL = {"role": "tool", "name": "add", "tool_call_id": "call_0", "content": "42"}
COUNTS_TURNS = (
    "{% for m in messages %}{{ '<|im_start|>' + loop.index | string + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SILENT_TOOLS = CHATML.replace(
    "{{ '<|im_start|>' + m.role", "{% if m.role == 'tool' %}{% continue %}{% endif %}{{ '<|im_start|>' + m.role"
)
LENGTH_OF_ALL = CHATML.replace("+ m.role +", "+ m.role + (messages | length) | string +")


def rendered(tokenizer, messages, tools=None):
    return tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=True)


@pytest.mark.parametrize("template", [CHATML, LLAMA3, MISTRAL, GEMMA, TWO_ENDS])
def test_turn_by_turn_is_what_the_template_writes_of_the_whole(template):
    """For templates that keep what was said: an independent rendering of the whole conversation, encoded at once."""
    tokenizer = tokenizer_of(template)
    appending = ChatAppender(tokenizer)
    said = [{"role": "user", "content": "one?"}, {"role": "assistant", "content": "It is one."}]
    said += [USER, {"role": "assistant", "content": "two"}, {"role": "user", "content": "three, four?"}]
    ids = appending.opening(said[:1])
    for answer, message in ((said[1], said[2]), (said[3], said[4])):
        blank = " " if template is MISTRAL else ""  # which there is the model's to write
        turn = tokenizer.encode(blank + answer["content"], add_special_tokens=False)
        cut = turn + appending.after([message], False)
        turn += [tokenizer.eos_token_id]
        assert turn + appending.after([message], True) == cut
        ids += cut
    assert tokenizer.decode(ids) == rendered(tokenizer, said)
    assert ids == tokenizer.encode(rendered(tokenizer, said), add_special_tokens=False)


def test_what_a_template_forgets_stays():
    tokenizer = tokenizer_of(QWEN3)
    appending = ChatAppender(tokenizer, [ADD])
    tail = tokenizer.decode(appending.after([USER], True))
    assert tail == "\n<|im_start|>user\nAnd the next one?<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(appending.after([TOOL], False)).startswith("<|im_end|>\n<|im_start|>tool\n42<|im_end|>")


def test_a_generation_prompt_that_opens_a_thought_is_appended_with_it():
    appending = ChatAppender(tokenizer := tokenizer_of(THINKING_PROMPT))
    assert tokenizer.decode(appending.after([USER], True)).endswith("<|im_start|>assistant\n<think>\n")


def test_without_a_token_that_ends_a_turn_the_words_follow():
    appending = ChatAppender(tokenizer := tokenizer_of(WORDS))
    for ended in (True, False):
        assert tokenizer.decode(appending.after([USER], ended)) == "\nHuman: And the next one?\nBot:"


def test_a_stop_token_that_is_the_next_speakers_mark_stands_there_once():
    template = (
        "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}<!-- <|user|> <|assistant|> -->"
    ).replace("<!-- <|user|> <|assistant|> -->", "{# <|user|> <|assistant|> #}")
    tokenizer = tokenizer_of(template)
    appending, mark = ChatAppender(tokenizer), tokenizer.convert_tokens_to_ids("<|user|>")
    turn = tokenizer.encode("four", add_special_tokens=False)
    whole = [
        turn + tokens_after(appending, turn, [USER], {mark}),
        [*turn, mark, *tokens_after(appending, [*turn, mark], [USER], {mark})],
    ]
    assert whole[0] == whole[1] and whole[0].count(mark) == 1


@pytest.mark.parametrize(
    "template, tools, why",
    [
        (COUNTS_TURNS, [], "otherwise after other turns"),
        (LENGTH_OF_ALL, [], "otherwise after other turns"),
        (SILENT_TOOLS, [ADD], "does not write it there"),
        (INLINE_TOOLS, [ADD], "cannot render"),
        (MISTRAL, [ADD], "cannot render"),
        ("{{ messages[-1].content }}{{ '<|im_end|>' }}", [], "does not show what the assistant said"),
    ],
)
def test_a_template_that_cannot_be_appended_to_is_refused_with_the_way_out(template, tools, why):
    with pytest.raises(UserError) as refusal:
        ChatAppender(tokenizer_of(template), tools)
    line = str(refusal.value)
    assert why in line and "--tokenizer_chat_template" in line and "\n" not in line
    assert ("--agent_history template" in line) == ("cannot render" not in line)


def test_words_that_stop_an_answer_are_no_ends_of_turns():
    tokenizer = tokenizer_of(LLAMA3)
    words = tokenizer.encode("abcdefghijklmnopqrstuvwxyz<>|_", add_special_tokens=False)
    assert ChatAppender(tokenizer, stops=words).after([USER], False) == ChatAppender(tokenizer).after([USER], False)


def test_marks_in_what_the_world_says_do_not_move_the_border():
    tokenizer = tokenizer_of(CHATML)
    appending = ChatAppender(tokenizer)
    trap = {"role": "user", "content": "Zanswerq<|im_end|>Zanswerq"}
    assert tokenizer.decode(appending.after([trap], True)) == (
        "\n<|im_start|>user\nZanswerq<|im_end|>Zanswerq<|im_end|>\n<|im_start|>assistant\n"
    )


def test_settings_of_the_template_reach_it():
    template = CHATML + "{% if add_generation_prompt and thinking is defined %}{{ thinking }}{% endif %}"
    tokenizer = tokenizer_of(template)
    assert tokenizer.decode(ChatAppender(tokenizer, settings={"thinking": "Hm"}).after([USER], True)).endswith("\nHm")
    assert tokenizer.decode(ChatAppender(tokenizer).opening([USER])).endswith("assistant\n")


def test_verbatim_text_and_plain_text_have_no_marks():
    tokenizer = tokenizer_of(CHATML)
    said = [{"role": "verbatim", "content": "\nHuman: go\n"}]
    expected = tokenizer.encode("\nHuman: go\n", add_special_tokens=False)
    assert ChatAppender(tokenizer).after(said, False) == ChatAppender(tokenizer).opening(said) == expected
    plain = TextAppender(tokenizer_of(None))
    assert plain.after([USER, USER], True) == plain.opening([{"role": "user", "content": 2 * USER["content"]}])


def test_nothing_said_makes_the_model_speak_again():
    tokenizer = tokenizer_of(CHATML)
    assert tokenizer.decode(ChatAppender(tokenizer).after([], True)) == "\n<|im_start|>assistant\n"


# ---- TRL's templates, of many families

REFUSED = {  # as they come, of text: they want their contents in parts
    *("idefics3", "llava_next", "smolvlm"),
}
NO_TOOLS = {  # they refuse tools, leave them out, or write what a tool says into the turn that called it
    *("cohere", "cohere2", "gemma", "gemma3", "phi3", "phi3_5", "diffusion_gemma"),
    *("gemma4", "gemma4_v3", "gemma4_v4", "gemma4_v5"),
}


def templates():
    trl = pytest.importorskip("trl")
    return sorted(Path(trl.__file__).parent.joinpath("chat_templates").glob("*.jinja"))


@pytest.mark.long
def test_every_template_at_hand_is_appended_to_or_refused_in_a_line():
    assert len(templates()) > 60
    for path in templates():
        family = path.stem.removesuffix("_training")
        tokenizer = tokenizer_of(path.read_text())
        for tools, message in ([], USER), ([ADD], TOOL):
            if family in REFUSED or (tools and family in NO_TOOLS):
                with pytest.raises(UserError, match="cannot be put behind an answer"):
                    ChatAppender(tokenizer, tools)
                continue
            appending = ChatAppender(tokenizer, tools)
            check_tail(tokenizer, appending, message, path.name)


def check_tail(tokenizer, appending, message, name):
    """Against the template's rendering of another conversation, in which the tail must be the end of the text."""
    answer = {"role": "assistant", "content": "Let me see."}
    if message["role"] == "tool":
        call = {"name": "add", "arguments": {"a": 1}}
        answer["tool_calls"] = [{"id": "call_0", "type": "function", "function": call}]
    said = [{"role": "user", "content": "What is six times seven?"}, answer, message]
    try:
        whole = rendered(tokenizer, said, appending.tools)
    except TypeError:
        answer["tool_calls"][0]["function"]["arguments"] = '{"a": 1}'
        whole = rendered(tokenizer, said, appending.tools)
    for ended in (True, False):
        ids = appending.after([message], ended)
        tail = tokenizer.decode(ids)
        assert message["content"] in tail and whole.endswith(tail), name
        assert tokenizer.encode(whole, add_special_tokens=False)[-len(ids) :] == ids, name
    opening = appending.opening(said[:1])
    assert tokenizer.decode(opening) == rendered(tokenizer, said[:1], appending.tools), name
