import signal

import numpy as np
import pytest

from tests.data import templates
from tests.data.rows import talk
from tests.data.templates import CHATML, GEMMA, GENERATION, LLAMA3, MISTRAL, QWEN3
from trimtab.data import chat_template
from trimtab.data.chat_template import ChatRenderer, render_pair, render_whole
from trimtab.data.rendering import tokenize_renderings
from trimtab.errors import UserError
from trimtab.train.proof import check_rendering
from trimtab.train.rl.rl_proof import check_prompt


def trained(rendering):
    return [rendering.text[start:end] for start, end in rendering.trained]


@pytest.mark.parametrize(
    "template, ends",
    [
        *((CHATML, "<|im_end|>"), (LLAMA3, "<|eot_id|>"), (MISTRAL, "</s>"), (GEMMA, "<end_of_turn>")),
        (GENERATION, "<|im_end|>"),  # whose blocks are taken from the template
        (templates.TWO_ENDS, "<|eot_id|><end_of_turn>"),  # all that ends a turn, and not the next one's first
    ],
)
def test_loss_covers_the_answers_and_their_end_of_turn_and_nothing_else(make_tokenizer, template, ends):
    messages = talk("one?", "It is one.", "two?", "It is two.")
    tokenizer, answers = make_tokenizer(template), [f"It is {number}.{ends}" for number in ("one", "two")]
    assert trained(ChatRenderer(tokenizer, multiturn=True).render(messages)) == answers
    assert trained(ChatRenderer(tokenizer).render(messages)) == answers[1:]


@pytest.mark.parametrize("template", [CHATML, LLAMA3, MISTRAL, GEMMA, QWEN3, GENERATION])
def test_text_is_exactly_the_templates_own_rendering(make_tokenizer, template):
    tokenizer = make_tokenizer(template)
    messages = talk("one?", " It is one.\n", "two?", "It is two.")
    expected = tokenizer.apply_chat_template(messages, tokenize=False)
    assert ChatRenderer(tokenizer, multiturn=True).render(messages).text == expected


@pytest.mark.parametrize("template", [LLAMA3, GEMMA])
def test_contents_that_the_template_trims_keep_right_spans(make_tokenizer, template):
    messages = talk("q", "\n  first \n", "q", " second ")
    spans = trained(ChatRenderer(make_tokenizer(template), multiturn=True).render(messages))
    assert [span.partition("<")[0] for span in spans] == ["first", "second"]


def test_system_text_folded_into_the_user_turn_is_not_trained(make_tokenizer):
    rendering = ChatRenderer(make_tokenizer(GEMMA), multiturn=True).render(talk("q", "a", system="Be kind."))
    assert trained(rendering) == ["a<end_of_turn>"]
    assert "Be kind.\n\nq" in rendering.text


def test_an_answer_that_quotes_the_templates_marks_is_one_span(make_tokenizer):
    quote = "x<|im_end|>\n<|im_start|>user\nq2<|im_end|>\n<|im_start|>assistant\ny"
    rendering = ChatRenderer(make_tokenizer(CHATML), multiturn=True).render(talk("q1", quote, "q2", "z"))
    assert trained(rendering) == [quote + "<|im_end|>", "z<|im_end|>"]


def test_thinking_removed_from_earlier_turns_is_absent_and_the_last_thought_is_trained(make_tokenizer):
    messages = talk("q1", "<think>\nhm\n</think>\n\nfirst", "q2", "<think>\nwell\n</think>\n\nsecond")
    rendering = ChatRenderer(make_tokenizer(QWEN3), multiturn=True).render(messages)
    assert trained(rendering) == ["first<|im_end|>", "<think>\nwell\n</think>\n\nsecond<|im_end|>"]
    assert "hm" not in rendering.text


def test_an_empty_thinking_block_that_the_template_writes_is_trained(make_tokenizer):
    rendering = ChatRenderer(make_tokenizer(QWEN3)).render(talk("q1", "a1", "q2", "a2"))
    assert trained(rendering) == ["<think>\n\n</think>\n\na2<|im_end|>"]


def with_a_tool(answer: str, **call) -> list[dict]:
    turns = talk("sum?", "", "", "two")
    return [turns[0], turns[1] | call, {"role": "tool", "content": answer}, turns[3]]


def test_reasoning_and_tool_calls_are_the_turns_own_words(make_tokenizer):
    call = {"name": "add", "arguments": {"a": 1}}
    messages = with_a_tool("2", tool_calls=[call], reasoning_content="use it")
    rendering = ChatRenderer(make_tokenizer(QWEN3), multiturn=True).render(messages, tools=[{"name": "add"}])
    assert rendering.text.startswith('<|im_start|>system\nTools: [{"name": "add"}]')
    first, second = trained(rendering)
    assert first.startswith("<think>\nuse it\n</think>\n\n<tool_call>") and first.endswith("</tool_call><|im_end|>")
    assert second == "<think>\n\n</think>\n\ntwo<|im_end|>"


def test_a_tools_answer_inside_a_turn_is_never_trained(make_tokenizer):
    messages = with_a_tool("TWO", tool_calls=[{"name": "add"}])
    with pytest.raises(UserError, match=r"row 1: .*generation"):
        ChatRenderer(make_tokenizer(templates.INLINE_TOOLS), multiturn=True).render(messages, where="row 1")


def test_loss_begins_where_a_generation_prompt_that_opens_a_thought_ends(make_tokenizer):
    renderer = ChatRenderer(make_tokenizer(templates.THINKING_PROMPT), multiturn=True)
    assert trained(renderer.render(talk("q1", "a1", "q2", "a2"))) == ["a1<|im_end|>", "\n</think>\na2<|im_end|>"]
    thought = renderer.render(talk("q1", "<think>\nhm\n</think>\na1", "q2", "<think>\nwell\n</think>\na2"))
    assert trained(thought) == ["\na1<|im_end|>", "well\n</think>\na2<|im_end|>"]


def test_a_template_without_special_tokens_gets_an_eos_after_the_last_turn(make_tokenizer):
    rendering = ChatRenderer(make_tokenizer(templates.WORDS), multiturn=True).render(talk("q1", "a1", "q2", "a2"))
    assert rendering.text == "Human: q1\nBot: a1\nHuman: q2\nBot: a2</s>"
    assert trained(rendering) == [" a1", " a2</s>"]


def test_completion_messages_are_trained_and_prompt_messages_are_not(make_tokenizer):
    messages = talk("q1", "a1", "q2", "a2", "q3", "a3")
    rendering = ChatRenderer(make_tokenizer(CHATML)).render(messages, trained_from=2)
    assert trained(rendering) == ["a2<|im_end|>", "a3<|im_end|>"]


@pytest.mark.parametrize("template", [CHATML, GENERATION])
def test_a_template_that_prints_the_date_prints_the_same_one_on_any_day(make_tokenizer, template):
    dated = "{{ 'Today: ' + strftime_now('%d %b %Y') + '\n' }}" + template
    rendering = ChatRenderer(make_tokenizer(dated)).render(talk("q", "a"))
    assert rendering.text.startswith("Today: 26 Jul 2024\n") and trained(rendering) == ["a<|im_end|>"]


@pytest.mark.parametrize(
    "template, messages, told",
    [
        (CHATML, talk("q", "a", "q2"), "the last turn is 'user'"),
        (GEMMA, talk("q", "a")[1:], ".*roles must alternate"),
        ("{% for m in messages %}{{ m.content[:2] + '.' }}{% endfor %}", talk("question", "answer"), ".*generation"),
    ],
    ids=["no answer", "refused by the template", "hidden by the template"],
)
def test_a_conversation_of_which_nothing_can_be_learnt_is_one_line_with_its_row(
    make_tokenizer, template, messages, told
):
    with pytest.raises(UserError, match=f"^row 3: {told}"):
        ChatRenderer(make_tokenizer(template)).render(messages, where="row 3")


def test_a_tokenizer_without_template_is_refused_with_the_flag(make_tokenizer):
    with pytest.raises(UserError, match="--tokenizer_chat_template"):
        ChatRenderer(make_tokenizer(None))


def test_plain_template_fills_only_the_first_hole_and_leaves_braces_alone(make_tokenizer):
    rendering = render_pair("f{x} {}", "{y}", make_tokenizer(), "{b} User: {} and {}\nA: ")
    assert rendering.text == "{b} User: f{x} {} and {}\nA: {y}</s>"
    assert trained(rendering) == ["{y}</s>"]


@pytest.mark.parametrize("template", [None, "no hole"])
def test_without_a_hole_the_prompt_stands_alone(make_tokenizer, template):
    assert render_pair("p ", "r", make_tokenizer(), template).text == "p r</s>"


def test_eos_is_not_doubled(make_tokenizer):
    assert render_pair("p", "r</s>", make_tokenizer(), None).text == "pr</s>"
    assert render_whole("t</s>", make_tokenizer()).text == "t</s>"


def test_language_modelling_trains_everything(make_tokenizer):
    assert trained(render_whole("some text", make_tokenizer())) == ["some text</s>"]


ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% for k in range(99999) %}{% endfor %}{% endfor %}"
ENDLESS += "{% endfor %}{% for message in messages %}{{ message['content'] }}{% endfor %}"


@pytest.mark.parametrize("block", ["", "{% generation %}x{% endgeneration %}"])
def test_a_template_that_never_ends_is_one_line(make_tokenizer, monkeypatch, block):
    monkeypatch.setattr(chat_template, "TEMPLATE_SECONDS", 0.2)
    renderer = ChatRenderer(make_tokenizer(ENDLESS + block))
    with pytest.raises(UserError, match=r"row 3: the chat template .* was not done after 0.2 s of computing"):
        renderer.render(talk("one?", "It is one."), where="row 3")
    with pytest.raises(UserError, match="was not done"):
        renderer.render_prompt(talk("one?"), where="row 3")
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0.0, 0.0)
    assert signal.getsignal(signal.SIGVTALRM) == signal.SIG_DFL


# ---- what the checks before the first step (train/proof.py, rl/rl_proof.py) say of renderings

EVERY = {name: text for name, text in vars(templates).items() if name.isupper()}
THOUGHTS = talk("q1", "<think>\nhm\n</think>\n\nfirst one", "q2", "<think>\nwell\n</think>\nsecond one")
CALL = {"name": "add", "arguments": {"a": 1}}


def checked(tokenizer, messages, late: int = 0, endless: bool = False, **how):
    """The verdict on this conversation, of whose turns the first `late` tokens, or the last one, carry no loss."""
    rendering = ChatRenderer(tokenizer, **how).render(messages)
    ((ids, mask),) = tokenize_renderings([rendering], tokenizer)
    edges = np.diff(mask.astype(int), prepend=0, append=0)
    for start in np.flatnonzero(edges == 1):
        mask[start : start + late] = False
    if endless:
        mask[np.flatnonzero(edges == -1) - 1] = False
    return check_rendering((ids, mask), {"messages": messages}, tokenizer, 10_000)


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize(
    "messages", [talk("q1", "It is one.", "q2", " It is two."), THOUGHTS], ids=["plain", "thoughts"]
)
def test_the_check_of_a_rendering_passes_what_the_renderer_makes(make_tokenizer, name, messages):
    for multiturn in (False, True):
        assert not checked(make_tokenizer(EVERY[name]), messages, multiturn=multiturn).problem


def test_the_check_of_a_rendering_passes_calls_and_answers_that_begin_with_a_special_token(make_tokenizer):
    called = with_a_tool("2", tool_calls=[CALL], reasoning_content="use it")
    assert not checked(make_tokenizer(QWEN3), called, multiturn=True).problem
    assert not checked(make_tokenizer(CHATML), talk("q", "<bos>an answer")).problem


# Of the others a thought would be shifted.
@pytest.mark.parametrize("name", [name for name in EVERY if name not in ("QWEN3", "THINKING_PROMPT")])
def test_the_check_of_a_rendering_fails_on_a_mask_that_begins_a_token_late(make_tokenizer, name):
    messages = talk("q1", "It is one.", "q2", "It is two.")
    late = 2 if name in ("MISTRAL", "WORDS") else 1  # a blank comes first
    for multiturn in (False, True):
        assert "mask is shifted" in checked(make_tokenizer(EVERY[name]), messages, late, multiturn=multiturn).problem
    assert "mask is shifted" in checked(make_tokenizer(QWEN3), messages, 1, multiturn=True).problem


def test_an_untrained_end_fails_also_behind_a_thought_whose_marks_are_added_tokens(make_tokenizer):
    tokenizer = make_tokenizer(QWEN3, eos="<|im_end|>")
    tokenizer.add_tokens(["<think>", "</think>"])
    assert not checked(tokenizer, THOUGHTS, multiturn=True).problem
    assert checked(tokenizer, THOUGHTS, endless=True, multiturn=True).failed
    assert checked(tokenizer, talk("q", "a"), endless=True).failed


class OnePrompt:
    def __init__(self, tokenizer, messages):
        self.messages, self.tokenizer = messages, tokenizer

    def ids(self, _):
        return self.tokenizer(self.text(0), add_special_tokens=False)["input_ids"]

    def text(self, _):
        return ChatRenderer(self.tokenizer).render_prompt(self.messages)

    def prompt(self, _):
        return self.messages


@pytest.mark.parametrize("name", EVERY)
def test_the_check_of_prompts_fails_where_a_generation_prompt_is_ignored_and_nowhere_else(make_tokenizer, name):
    def problem(template):
        tokenizer = make_tokenizer(template)
        return check_prompt(OnePrompt(tokenizer, talk("q")), tokenizer, as_chat=True).problem

    assert not problem(EVERY[name])
    ignored = "it ignores add_generation_prompt" in problem(EVERY[name].replace("add_generation_prompt", "false"))
    assert ignored == (name != "MISTRAL")  # which has none: its answers follow the prompt directly
