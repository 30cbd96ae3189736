"""The puzzles that the project makes, judged by their text alone."""

import itertools
import re

import pytest

from trimtab.embedded.knights_task import make_model, make_puzzles

JUDGED = r"(\w+) is a (knight|knave)"


def holds(words: str, roles: dict[str, bool]) -> bool:
    """Whether what somebody says is so."""
    values = [roles[name] == (role == "knight") for name, role in re.findall(JUDGED, words)]
    form = re.sub(JUDGED, "X", words)
    return {
        "X": lambda a: a,
        "X and X": lambda a, b: a and b,
        "X or X": lambda a, b: a or b,
        "if X then X": lambda a, b: b if a else True,
        "X exactly if X": lambda a, b: a is b,
    }[form](*values)


@pytest.mark.parametrize("people", [2, 3])
def test_a_puzzle_has_the_one_solution_that_its_row_gives(people):
    for puzzle in make_puzzles(100, 0, people):
        said = re.findall(r'(\w+) says: "(.*?)"', puzzle["quiz"])
        assert [name for name, _ in said] == puzzle["names"] and len(said) == people
        fitting = [
            roles
            for values in itertools.product((True, False), repeat=people)
            if (roles := dict(zip(puzzle["names"], values)))
            and all(holds(words, roles) == roles[speaker] for speaker, words in said)
        ]
        assert fitting == [dict(zip(puzzle["names"], puzzle["solution"]))]
        assert dict(re.findall(JUDGED, puzzle["solution_text_format"])) == {
            name: "knight" if told else "knave" for name, told in fitting[0].items()
        }


def test_puzzles_depend_on_the_seed_alone_and_differ():
    assert make_puzzles(20, 1) == make_puzzles(20, 1) != make_puzzles(20, 2)
    assert len({puzzle["quiz"] for puzzle in make_puzzles(100, 1)}) > 95


def test_the_models_tokens_give_an_answer_back_as_it_was():
    _, tokenizer = make_model()
    answer = " so </think><answer>(1) Ada is a knight\n(2) Fay is a knave</answer>"
    assert tokenizer.decode(tokenizer(answer).input_ids) == answer
