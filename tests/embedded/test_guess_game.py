import itertools

import pytest
import torch

from trimtab.embedded import guess_game
from trimtab.embedded.guess_game import HIGHEST, OPENING, TRIES, Guess, rows
from trimtab.envs.types import Task, Turn


def played(number: int, guess) -> tuple[float, list[str]]:
    """The reward of a game in which `guess` says what to answer to all that was heard, and what was heard."""
    game = Guess()
    heard = [game.reset(Task(0, 0, 0, label=str(number)))]
    reward = 0.0
    for turn in range(TRIES):
        text = guess(heard)
        step = game.step(Turn(text, {"role": "assistant", "content": text}, [], "stop", turn, 9))
        reward += step.reward
        if step.done:
            return reward, heard
        assert isinstance(step.messages, str)
        heard.append(step.messages)
    raise AssertionError("it ends with the last guess")


def halving(heard: list[str]) -> str:
    low, high = 1, HIGHEST
    for word in heard[1:]:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if word == "higher" else (low, middle - 1)
    return str((low + high) // 2)


def test_who_listens_finds_every_number_and_who_does_not_finds_three_of_seven():
    numbers = range(1, HIGHEST + 1)
    assert [played(number, halving)[0] for number in numbers] == [1.0] * HIGHEST
    for fixed in itertools.permutations(guess_game.NUMBERS, TRIES):
        assert sum(played(number, lambda heard, said=fixed: said[len(heard) - 1])[0] for number in numbers) == TRIES


@pytest.mark.parametrize("text", ["", "four", "4 5", "-4", "٤", "4.0"])
def test_what_is_no_number_costs_a_guess(text):
    reward, heard = played(4, lambda heard: text)
    assert reward == 0 and heard[1:] == ["only a number, please"] * (TRIES - 1)


def test_the_number_is_the_labels_or_the_seeds():
    assert {row["label"] for row in rows(100, 0)} == set(guess_game.NUMBERS)
    assert rows(9, 1) == rows(9, 1) != rows(9, 2)
    first, second = Guess(), Guess()
    for game in (first, second):
        assert game.reset(Task(0, 0, 17)) == OPENING
    assert first.number == second.number


def test_the_models_tokens_are_the_games_phrases_and_its_first_guess_is_any_number():
    tokenizer, model = guess_game.make_tokenizer(), guess_game.make_model()
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": OPENING}], add_generation_prompt=True, return_dict=False
    )
    assert tokenizer.convert_ids_to_tokens(ids) == ["<user>", OPENING, "<assistant>"]
    with torch.no_grad():
        chances = model(torch.tensor([ids])).logits[0, -1].softmax(-1)
    of_numbers = chances[tokenizer.convert_tokens_to_ids(list(guess_game.NUMBERS))]
    assert of_numbers.sum() > 0.8 and of_numbers.max() < 0.3
