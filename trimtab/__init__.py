"""Trimtab steers language models from feedback, on one CPU or several GPUs."""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from trimtab.errors import Error as Error
    from trimtab.errors import Interrupted as Interrupted
    from trimtab.errors import RunFailed as RunFailed
    from trimtab.errors import UserError as UserError

# Where each name is defined. It is imported when it is first asked for: `import trimtab` loads no torch.
_PLACES = {
    **dict.fromkeys(("Error", "Interrupted", "RunFailed", "UserError"), "trimtab.errors"),
}

# Written out, so that type checkers can read it. A star must not put another `open` over Python's.
__all__ = ["Error", "Interrupted", "RunFailed", "UserError", "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'trimtab' has no attribute {name!r}")
    value = getattr(importlib.import_module(_PLACES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_PLACES})
