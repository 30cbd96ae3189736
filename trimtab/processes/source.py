"""A user's Python file as a module."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType


def module_of(file: Path, name: str) -> ModuleType:
    sys.path.insert(0, str(file.parent))  # the file may import its neighbours
    specification = importlib.util.spec_from_file_location(name, file)
    assert specification is not None and specification.loader is not None, "the caller has seen that it is Python"
    module = importlib.util.module_from_spec(specification)
    sys.modules[specification.name] = module
    specification.loader.exec_module(module)
    return module
