"""The tags <think> and <answer> in a response, found without regular expressions: linear in any text."""

OPENED_THINKING = "<think>"
TAGS = ("<think>", "</think>", "<answer>", "</answer>")


def completed(prompt: str, response: str) -> str:
    """The response with the <think> that a prompt may have written for it."""
    return OPENED_THINKING + response if prompt.rstrip().endswith(OPENED_THINKING) else response


def in_order(text: str) -> bool:
    """Whether each of the four tags stands in the text exactly once, and in their order."""
    places = [text.find(tag) for tag in TAGS]
    return all(text.count(tag) == 1 for tag in TAGS) and places == sorted(places)


def last_answer(text: str) -> str | None:
    """What stands between the last <answer> that is closed and its end."""
    end = text.rfind("</answer>")
    start = text.rfind("<answer>", 0, end) if end >= 0 else -1
    return text[start + len("<answer>") : end].strip() if start >= 0 else None
