"""`trimtab chat`, its lines coming from a pipe."""

import io
import itertools

import pytest
from transformers import AutoTokenizer

from trimtab.evaluate import interactive
from trimtab.rollout.builtin.engine import BuiltinSession

GREEDY = ("--greedy_sampling", "--repetition_penalty", 1)


def before(monkeypatch, kind, name, note) -> None:
    """Call `note` with the arguments of a method before each of its calls."""
    plain = getattr(kind, name)
    monkeypatch.setattr(kind, name, lambda *words, **how: (note(*words, **how), plain(*words, **how))[1])


@pytest.fixture
def chat(job, monkeypatch):
    command = job("chat")

    def talk(*words, lines):
        monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        return command("--pretrain", "model", "--max_len", 60, *words)

    return talk


@pytest.fixture
def asked(monkeypatch):
    """The prompts that the engine gets, as text."""
    prompts = []
    before(monkeypatch, BuiltinSession, "add", lambda s, ids, **_: prompts.append(s.engine.tokenizer.decode(ids)))
    return prompts


@pytest.fixture
def short(monkeypatch):
    """Answers of a few tokens, whatever the model likes."""
    plain = interactive.sampling_of
    monkeypatch.setattr(interactive, "sampling_of", lambda o, **k: plain(o, **k | {"max_new_tokens": 5}))


@pytest.fixture
def answers(monkeypatch):
    """What the model said in a talk that ended well."""
    said = []
    before(monkeypatch, interactive.Conversation, "_remember", lambda talk, words, answer: said.append(answer))

    def of(outcome):
        assert outcome.code == 0, outcome.err
        assert outcome.out == "".join(f"{answer}\n" for answer in said)
        return said

    return of


def test_turns_follow_each_other_in_the_models_chat_template(chat, answers, asked, short):
    told = answers(chat(*GREEDY, lines=["sort 21", "", "again"]))
    assert asked[0] == "<user>sort 21<assistant>"
    assert len(told) == 2 and asked[1] == f"<user>sort 21<assistant>{told[0]}<eos><user>again<assistant>"


def test_a_turn_reads_only_what_is_new(chat, answers, short, monkeypatch):
    read, plain = [0], BuiltinSession.close

    def close(session):
        plain(session)
        read.append(session.engine.prefilled_tokens)

    monkeypatch.setattr(BuiltinSession, "close", close)
    answers(chat(*GREEDY, lines=["sort 21", "again", "and again"]))
    # Two tokens around the words, before them <eos>, and before that the answer's last token, which was only drawn.
    assert [later - earlier for earlier, later in itertools.pairwise(read)] == [7 + 2, 5 + 4, 9 + 4]


@pytest.mark.parametrize("head, tail", [("Q: ", "\nA: "), ("User: ", "\nAssistant: ")])  # the second is the default
def test_turns_follow_each_other_in_a_template_of_text(chat, answers, asked, short, head, tail):
    told = answers(chat(*GREEDY, "--input_template", f"{head}{{}}{tail}", lines=["one", "two {}"]))
    assert asked == [f"{head}one{tail}", f"{head}one{tail}{told[0]}\n{head}two {{}}{tail}"]


def test_clear_forgets_and_quit_leaves(chat, answers, asked, short):
    told = answers(chat(*GREEDY, lines=["sort 21", "/clear", "sort 21", "/quit", "sort 31"]))
    assert asked == ["<user>sort 21<assistant>"] * 2 and told[0] == told[1]


def test_a_preamble_begins_every_conversation(chat, answers, asked, short, place):
    (place / "preamble.txt").write_text("Be brief.")
    words = ("--ta_prompt", "preamble.txt", "--input_template", "Q: {} A:")
    answers(chat(*GREEDY, *words, lines=["one", "/clear", "one"]))
    assert asked == ["Be brief.\nQ: one A:"] * 2


def test_a_wish_for_a_reward_follows_every_turn_but_is_not_remembered(chat, answers, asked, short):
    told = answers(chat(*GREEDY, "--enable_csft", "--csft_prompt", "good", lines=["one", "two"]))
    assert asked == ["<user>one good <assistant>", f"<user>one<assistant>{told[0]}<eos><user>two good <assistant>"]


def test_the_answer_is_shown_as_it_is_written(chat, answers, monkeypatch):
    pieces, plain = [], interactive._Answer.grow

    def grow(answer, ids, **how):
        plain(answer, ids, **how)
        pieces.append(answer.text)

    monkeypatch.setattr(interactive._Answer, "grow", grow)
    told = answers(chat(*GREEDY, lines=["sort 21"]))
    assert len(set(pieces)) > 3 and told == [pieces[-1]]
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(pieces))


def test_ctrl_c_stops_the_answer_and_not_the_program(chat, answers, asked, monkeypatch):
    calls, plain = [], interactive._Answer.grow

    def grow(answer, ids, **how):
        plain(answer, ids, **how)
        calls.append(len(ids))
        if len(ids) >= 9 and len(asked) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(interactive._Answer, "grow", grow)
    told = answers(chat(*GREEDY, lines=["sort 21", "more"]))
    tokenizer = AutoTokenizer.from_pretrained("model")
    assert len(told) == 2 and len(tokenizer(told[0])["input_ids"]) <= 9
    assert asked[1].startswith(f"<user>sort 21<assistant>{told[0]}<eos><user>more")


def test_a_full_context_is_one_line_and_the_talk_goes_on(chat, answers):
    done = chat(*GREEDY, lines=["sort 21", "x" * 60, "/clear", "sort 21"])
    told = answers(done)
    assert len(told) == 2 and told[0] == told[1]
    assert "tokens with these words, and 60 is the most: /clear begins a new one" in done.err


def test_an_answer_that_ends_at_the_limit_says_so(chat):
    done = chat(*GREEDY, "--max_len", 14, lines=["sort 21"])
    assert "trimtab chat: the answer ends here, at 14 tokens" in done.err


def test_mistakes_are_one_line(chat):
    assert "--ta_prompt: nowhere is not a file" in chat("--ta_prompt", "nowhere", lines=[]).mistake
    assert "--top_p is 0: it must be above 0" in chat("--top_p", 0, lines=[]).mistake


def test_help_is_answered_and_not_said_to_the_model(chat, answers):
    done = chat(*GREEDY, lines=["/help", "/quit"])
    assert answers(done) == [] and "/clear begins anew, /quit or Ctrl-D leaves" in done.err
