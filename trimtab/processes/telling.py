"""What a process that runs somebody's code says of it, so that it can be written as JSON and read by a person."""

import traceback
from typing import Any


def plain(value: Any) -> Any:
    """Tensors and arrays as lists, anything strange by its name."""
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    if isinstance(value, dict):
        return {str(name): plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    return value if value is None or isinstance(value, int | float | str) else f"<{type(value).__name__}>"


def told(error: BaseException, file: str) -> str:
    """The error in one line, with the line of the file where it was met."""
    text = " ".join(str(error).split())
    words = (f"{type(error).__name__}: {text}" if text else type(error).__name__)[:500]
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    return f"{words} (line {lines[-1]})" if lines else words
