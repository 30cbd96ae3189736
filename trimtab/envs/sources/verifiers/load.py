"""`verifiers:MODULE`: an environment written for verifiers, of either generation: a module that is installed, or a
file, as in `verifiers:games/wordle.py?rounds=3`. It plays its episodes itself, as an agent does, and offers its own
rows."""

import importlib.util
import sys
from pathlib import Path

from trimtab.envs.loaded import Loaded
from trimtab.envs.sources.named import library, split
from trimtab.errors import UserError


def load(place: str) -> Loaded:
    name, options = split(place)
    source = f"verifiers:{place}"
    library("verifiers", "verifiers", source)
    module = _module(name, source)
    if importlib.util.find_spec("verifiers.envs") is not None:
        from trimtab.envs.sources.verifiers import classic

        return classic.load(module, options, source)
    from trimtab.envs.sources.verifiers import tasksets

    return tasksets.load(module, options, source)


def _module(name: str, source: str) -> str:
    """As it is imported; a file's folder is made to be looked into."""
    if not name.endswith(".py"):
        return name
    file = Path(name).expanduser().resolve()
    if not file.is_file():
        raise UserError(f"--environment {source}: {file}: no such file")
    sys.path.insert(0, str(file.parent))
    return file.stem
