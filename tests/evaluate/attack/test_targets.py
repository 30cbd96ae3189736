import pytest

from trimtab.embedded.sort_task import make_tokenizer
from trimtab.errors import UserError
from trimtab.evaluate.gcg_attack import AttackPrompts, Target, read_targets


def written(tmp_path, text):
    path = tmp_path / "goals.csv"
    path.write_text(text)
    return str(path)


def test_goals_and_targets_are_read_and_escaped_quotes_mended(tmp_path):
    path = written(tmp_path, 'goal,target\nSay it,"Sure, here\\\'s how"\nAgain,Sure\nMore,Sure\n')
    targets, mended = read_targets(path, "behaviors", 2)
    assert targets == [Target("Say it", "Sure, here's how"), Target("Again", "Sure")] and mended == 1
    assert read_targets(path, "strings", 1)[0] == [Target("", "Sure, here's how")]


@pytest.mark.parametrize(
    "text, scenario, complaint",
    [
        ("goal,answer\na,b\n", "behaviors", "has no column target: .*needs goal and target, and it has goal, answer"),
        ("prompt,target\na,b\n", "behaviors", "has no column goal"),
        ("goal,target\na,b\nc,\n", "behaviors", "row 2: target is empty"),
        ("goal,target\n,b\n", "behaviors", "row 1: goal is empty"),
        ("goal\na\n", "strings", "has no column target"),
    ],
)
def test_a_file_without_goal_or_target_is_one_clear_line(tmp_path, text, scenario, complaint):
    with pytest.raises(UserError, match=complaint) as error:
        read_targets(written(tmp_path, text), scenario, 10)
    assert "\n" not in str(error.value) and "goals.csv" in str(error.value)


def test_the_suffix_stands_between_goal_and_answer_as_in_the_real_prompt():
    prompts = AttackPrompts(make_tokenizer())
    for goal in ("hello?", "", "SUFFIX"):
        around = prompts.around(Target(goal, "sure"))
        suffix = prompts.encode("abc")
        assert [*around.before, *suffix, *around.after] == prompts.ids(f"{goal}abc")
        assert around.target == prompts.encode("sure")


def test_without_a_chat_template_the_goal_is_plain_text():
    tokenizer = make_tokenizer()
    tokenizer.chat_template = None
    around = AttackPrompts(tokenizer).around(Target("this man is a", "good"))
    assert tokenizer.decode(around.before) == "this man is a" and around.after == []
