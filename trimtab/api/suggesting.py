"""What somebody most likely meant who wrote a word that is not known."""

import difflib
from collections.abc import Iterable


def suggested(word: object, known: Iterable[str]) -> str:
    """To follow what says that the word is not known."""
    names = list(known)
    close = difflib.get_close_matches(str(word), names, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else f"there are {', '.join(names)}"
