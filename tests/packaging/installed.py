"""Is an installed Trimtab whole? Run by the Python it is installed for, outside the repository (see `make wheel`)."""

import importlib.util
import pkgutil
import shutil
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path


def main() -> None:
    import trimtab

    folder = Path(trimtab.__file__).parent
    assert Path(sys.prefix) in folder.parents, f"{folder} is not installed in {sys.prefix}"
    assert not {"torch", "transformers"} & sys.modules.keys(), "import trimtab is heavy"
    assert (folder / "py.typed").is_file(), "no type marker"
    assert metadata.version("trimtab") == trimtab.__version__

    public = [name for name in dir(trimtab) if name in trimtab._PLACES]
    assert public and all(getattr(trimtab, name) is not None for name in public)
    modules = [found.name for found in pkgutil.walk_packages(trimtab.__path__, "trimtab.")]
    assert all(importlib.util.find_spec(name) for name in modules if name.count(".") == 1)

    from trimtab.cli.main import VERBS

    command = shutil.which("trimtab", path=str(Path(sys.executable).parent))
    assert command, "no command trimtab"
    said = subprocess.run([command, "--version"], capture_output=True, text=True, check=True).stdout
    assert said == f"trimtab {trimtab.__version__}\n", said
    for verb in VERBS:
        subprocess.run([command, verb, "--help"], capture_output=True, check=True)
    short = "quickstart --steps 2 --iterations 2"
    with tempfile.TemporaryDirectory() as elsewhere:
        subprocess.run([command, *short.split()], cwd=elsewhere, check=True, stdout=subprocess.DEVNULL)
    print(f"trimtab {trimtab.__version__}: {len(public)} public names, {len(VERBS)} commands, {len(modules)} modules")


if __name__ == "__main__":
    main()
