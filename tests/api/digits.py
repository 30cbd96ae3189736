"""A reward, in a file that a process of its own loads without torch."""


def early_digits(prompts, completions, label, **columns):
    said = [completion[0]["content"] if isinstance(completion, list) else completion for completion in completions]
    return [sum(character in "01234" for character in text) / 6 + 0.01 * len(right) for text, right in zip(said, label)]
