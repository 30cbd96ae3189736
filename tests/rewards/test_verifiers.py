"""Golden cases of every verifier, hostile ones among them."""

import pytest

from tests.rewards.samples import make_reward_request
from trimtab.errors import UserError
from trimtab.rewards.types import RewardFailed
from trimtab.rewards.verifiers import final_number, make_verifier, parse_verifier_spec

HUGE = "9" * 20_000
KK_LABEL = "(1) Zoey is a knight\n(2) Owen is a knave"
KK_RIGHT = "(1) Zoey is a knight\n(2) Owen is a knave"


def score(name: str, response: str, label=None, prompt: str = "a question") -> float:
    return make_verifier(name)(make_reward_request([response], [label], [prompt])).rewards[0]


@pytest.mark.parametrize(
    "response, label, right",
    [
        ("She sells 48 + 24 = 72.\n#### 72", "work\n#### 72", 1),
        ("#### 71", "#### 72", 0),
        ("The answer is 72.", "72", 1),
        ("The answer is 72.00 dollars", "72", 1),
        ("That makes $1,234,567.50", "1234567.5", 1),
        ("#### 12\nwait, no\n#### 13", "13", 1),
        ("#### 13 and not 99", "13", 1),
        (r"so \boxed{42} at last, 7", "42", 1),
        ("<answer>6</answer> and 8", "6", 1),
        ("it is -5", "-5", 1),
        ("8-5", "5", 1),
        ("8-5", "-5", 0),
        ("about.5", ".5", 1),
        ("1,2,3", "3", 1),
        ("1,2345", "2345", 1),
        ("no number", "72", 0),
        ("", "72", 0),
        ("72", "no number", 0),
        ("٧٢", "72", 0),
        ("７２", "72", 0),
        ("10²", "10", 1),
        ("72" + "\u200b", "72", 1),
        ("1e400", "400", 1),
        (HUGE, HUGE, 1),
        (HUGE, HUGE[:-1] + "8", 0),
        (f"0.{HUGE}", f"0.{HUGE}", 1),
        ("1," * 50_000 + "7", "7", 1),
        ("-" * 100_000 + "7", "-7", 1),
        ("#" * 100_000 + "7", "7", 1),
        ("5", 5, 1),
    ],
)
def test_number_match(response, label, right):
    assert score("gsm8k", response, label) == right == score("number", response, label)


def test_a_number_of_a_million_digits_is_read_exactly():
    assert final_number("1" + "0" * 1_000_000) == final_number(f"the {'0' * 9}1{'0' * 1_000_000}.0")


@pytest.mark.parametrize(
    "response, label, right",
    [
        ("Paris", "Paris", 1),
        ("  Paris\n", "Paris", 1),
        ("paris", "Paris", 0),
        ("New   York", "New York", 1),
        ("<think>Rome?</think> <answer> Paris </answer>", "Paris", 1),
        ("<answer>Rome</answer><answer>Paris</answer>", "Paris", 1),
        ("<answer>Paris", "Paris", 0),
        ("</answer>Paris<answer>", "Paris", 0),
        ("7", 7, 1),
        ("", "", 1),
    ],
)
def test_exact_match(response, label, right):
    assert score("exact", response, label) == right


GOOD = "<think>hm</think><answer>7</answer>"


@pytest.mark.parametrize(
    "response, right",
    [
        (GOOD, 1),
        (f"  {GOOD} ", 1),
        ("<think></think>\n\n<answer></answer>", 1),
        ("<answer>7</answer><think>hm</think>", 0),
        ("<think><answer>7</think></answer>", 0),
        (GOOD + GOOD, 0),
        ("<think><think>hm</think></think><answer>7</answer>", 0),
        ("<think>hm</think><answer>7", 0),
        ("<THINK>hm</THINK><ANSWER>7</ANSWER>", 0),
        ("hm</think><answer>7</answer>", 0),
        ("<think>" * 100_000, 0),
        ("<thi<think>nk>hm</think><answer>7</answer>", 1),
        ("", 0),
    ],
)
def test_format(response, right):
    assert score("format", response) == right


def test_a_prompt_may_have_opened_the_thinking():
    assert score("format", "hm</think><answer>7</answer>", prompt="solve\n<think>") == 1
    assert score("format", GOOD, prompt="solve\n<think>\n") == 0


@pytest.mark.parametrize(
    "response, total",
    [
        (f"hm</think><answer>{KK_RIGHT}</answer>", 3.0),
        (f"<|im_start|>assistant\n<think>hm</think><answer>{KK_RIGHT}</answer>", 3.0),
        ("hm</think><answer>zoey IS A KNIGHT and\nowen is a Knave.</answer>", 3.0),
        ("hm</think> so <answer>Zoey is a knave, Owen is a knight</answer>", -0.5),
        ("hm</think><answer>Zoey is a knight</answer>", -1.0),
        ("hm</think><answer></answer>", -1.0),
        ("hm</think><answer>Zoey is a knight, Owen is a knave, Eve is a knave</answer>", -1.0),
        ("hm</think><answer>Zoe is a knight, Owen is a knave</answer>", -1.0),
        ("hm</think><answer>Zoey is a knight is a knave</answer>", -1.0),
        (KK_RIGHT, -3.0),
        ("", -3.0),
        (f"<think>hm</think><answer>{KK_RIGHT}</answer>", -3.0),
        (f"hm</think><answer>{KK_RIGHT}</answer><answer>{KK_RIGHT}</answer>", -3.0),
        (f"<answer>{KK_RIGHT}</answer></think>", -3.0),
        ("hm</think><answer>" + "Zoey is a knight " * 20_000 + "</answer>", -1.0),
        ("hm</think><answer>Zoey" + " " * 200_000 + "knight Owen knave</answer>", -1.0),
    ],
)
def test_knights_and_knaves_has_four_totals(response, total):
    assert score("kk", response, KK_LABEL) == total


def test_the_solution_is_also_read_from_verls_ground_truth():
    column = [{"ground_truth": {"solution_text_format": KK_LABEL, "statements": "()"}}]
    request = make_reward_request([f"hm</think><answer>{KK_RIGHT}</answer>"], reward_model=column)
    assert make_verifier("kk")(request).rewards == [3.0]


@pytest.mark.parametrize(
    "spelling, response, label, right",
    [
        (r"regex(^\d+$)", "123", None, 1),
        (r"regex(^\d+$)", "12a", None, 0),
        ("regex", "abc", "b.$", 1),
        (r"regex(a(b|c)d)", "acd", None, 1),
        (r"regex(\()", "f(x", None, 1),
        ("regex(a,b:c)", "a,b:c", None, 1),
        ("regex(a.b)", "a\nb", None, 1),
    ],
)
def test_regular_expression(spelling, response, label, right):
    assert score(spelling, response, label) == right


@pytest.mark.parametrize("pattern", [r"(a+)+$", r"(a|aa)+$", r"(.*a){30}b", r"(x+x+)+y"])
def test_a_catastrophic_regular_expression_is_bounded(pattern):
    # The test is that this ends at all: the plain search would take longer than the age of the universe.
    assert score(f"regex({pattern})", "a" * 60 + "x" * 60 + "!") == 0


@pytest.mark.parametrize(
    "spelling, size, expected",
    [
        ("length(10)", 0, 1.0),
        ("length(10)", 10, 1.0),
        ("length(10)", 15, 0.5),
        ("length(10)", 20, 0.0),
        ("length(10)", 10**6, 0.0),
        ("length(4-10)", 4, 1.0),
        ("length(4-10)", 3, 0.5),
        ("length(4-10)", 1, 0.0),
    ],
)
def test_length(spelling, size, expected):
    assert score(spelling, "x" * size) == pytest.approx(expected)


def test_verifiers_are_summed_with_their_weights_and_logged_apart():
    result = make_verifier("gsm8k:1.0, format:0.2,length(99):0.5")(make_reward_request([f"{GOOD}", "8"], ["7", "7"]))
    assert result.rewards == pytest.approx([1.7, 0.5])
    assert result.logs == {"gsm8k": [1.0, 0.0], "format": [1.0, 0.0], "length": [1.0, 1.0]}


def test_the_spelling_of_a_sum():
    assert parse_verifier_spec(r"gsm8k:1.0,regex(a(b,c)\):d):-2e-1 , length(3)") == [
        ("gsm8k", None, 1.0),
        ("regex", r"a(b,c)\):d", -0.2),
        ("length", "3", 1.0),
    ]


@pytest.mark.parametrize(
    "text, words",
    [
        ("gsm9k", "no verifier gsm9k; there are gsm8k"),
        ("gsm8k:much", "weight 'much' is not a number"),
        ("gsm8k format", "comma or :WEIGHT is expected at ' format'"),
        ("gsm8k,:1", "a name is expected at ':1'"),
        ("", "a name is expected"),
        ("length", "length needs an argument"),
        ("exact(3)", "exact takes no argument"),
        ("regex((a)", "bracket is not closed"),
        ("regex([)", "not a regular expression"),
        ("length(x)", "give characters as HIGH or LOW-HIGH"),
        ("length(9-3)", "give characters as HIGH or LOW-HIGH"),
    ],
)
def test_a_misspelt_sum_is_one_line(text, words):
    with pytest.raises(UserError, match=words):
        make_verifier(text)


@pytest.mark.parametrize("name", ["gsm8k", "exact", "kk", "regex"])
def test_a_row_without_a_label_is_named(name):
    with pytest.raises(RewardFailed, match="row 1 has no label") as caught:
        make_verifier(name)(make_reward_request(["1", "2"], [KK_LABEL, None]))
    assert caught.value.row == 1


def test_a_label_of_the_wrong_kind_is_named():
    right = f"x</think><answer>{KK_RIGHT}</answer>"
    with pytest.raises(RewardFailed, match="kk: row 1: the label is no solution"):
        make_verifier("kk")(make_reward_request([right, right], [KK_LABEL, "42"]))
    with pytest.raises(RewardFailed, match=r"regex: row 0: the label '.' is not a regular"):
        make_verifier("regex")(make_reward_request(["x"], ["("]))


def test_every_verifier_gets_through_hostile_texts():
    # In quadratic time this would not end while anybody watches.
    hostile = ["<think>" * 100_000, "1,111" * 100_000, "- " * 100_000, "\\boxed{" * 100_000, " is a knight" * 50_000]
    result = make_verifier("gsm8k,exact,format,kk,length(9)")(
        make_reward_request(hostile, [KK_LABEL + " 5"] * len(hostile))
    )
    assert result.rewards == [-3.0, -3.0, -3.0, -3.0, -3.0]


@pytest.fixture(scope="module")
def mathematics():
    pytest.importorskip("math_verify")
    verifier = make_verifier("math")
    yield verifier
    verifier.close()


def test_equal_expressions_are_equal(mathematics):
    cases = [
        (r"The answer is \boxed{0.5}", "1/2", 1),
        (r"$\frac{2}{6}$", r"\frac{1}{3}", 1),
        ("$1+x$", "x+1", 1),
        (r"\boxed{(1, 2)}", "(1,2)", 1),
        ("so it is 73", "72", 0),
        ("48 + 24 = 72, so 72", "long work\n#### 72", 1),
        ("no idea", "72", 0),
        ("", "72", 0),
        (r"\boxed{\sqrt{2}}", r"$2^{1/2}$", 1),
    ]
    responses, labels, right = zip(*cases)
    assert mathematics(make_reward_request(list(responses), list(labels))).rewards == list(map(float, right))


def test_an_expression_beyond_the_limits_is_not_equal(mathematics):
    hostile = r"\boxed{9^{9^{9^{9}}}}"
    assert mathematics(make_reward_request([hostile, r"\boxed{7}"], ["7", "7"])).rewards == [0.0, 1.0]


def test_mathematics_without_its_package_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr("trimtab.rewards.verifiers.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'trimtab\[math\]'"):
        make_verifier("math")
