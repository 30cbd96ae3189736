"""What a node says of itself: versions, what it can read, and whether it shares folders with the others."""

from collections.abc import Callable
from pathlib import Path
from typing import Any


def token_name(folder: str, token: str) -> Path:
    """The file that the controller writes into a shared folder."""
    return Path(folder) / f".trimtab-{token}"


def answer_name(folder: str, token: str, node: str) -> Path:
    """The file that a node writes beside it, with its id in it."""
    return Path(folder) / f".trimtab-{token}-{node}"


def inspector() -> Callable[[dict[str, Any], str], dict[str, Any]]:
    """A function that travels whole, with all that it needs inside: a node may have another trimtab, or none."""

    def look(request: dict[str, Any], node: str) -> dict[str, Any]:
        import os
        import platform
        import time
        from importlib import metadata
        from pathlib import Path

        def version(package: str) -> str | None:
            try:
                return metadata.version(package)
            except metadata.PackageNotFoundError:
                return None

        def own_version() -> str | None:
            try:
                from trimtab import __version__
            except ImportError:
                return None
            return __version__

        def unreadable(path: Path) -> str | None:
            try:
                if path.is_dir():
                    os.listdir(path)
                else:
                    with path.open("rb") as file:
                        file.read(1)
            except OSError as error:
                return error.strerror or type(error).__name__
            return None

        def listing(path: Path) -> list[tuple[str, int]]:
            files = [one for one in path.iterdir() if one.is_file()] if path.is_dir() else [path]
            return sorted((one.name, one.stat().st_size) for one in files)

        def unseen(folder: Path) -> str | None:
            token = request["token"]
            until = time.monotonic() + request["patience"]
            while True:
                try:
                    if (folder / f".trimtab-{token}").read_text() == token:
                        break
                except OSError:
                    pass
                if time.monotonic() > until:
                    return "does not see what this machine writes to"
                time.sleep(0.2)
            try:
                (folder / f".trimtab-{token}-{node}").write_text(node)
            except OSError as error:
                return f"cannot write ({error.strerror}) to"
            return None

        read = {name: Path(path) for name, path in request["read"].items()}
        refused = {name: reason for name, path in read.items() if (reason := unreadable(path))}
        return {
            "versions": {
                "python": platform.python_version(),
                "trimtab": own_version(),
                **{package: version(package) for package in request["packages"]},
            },
            "unreadable": refused,
            "listings": {name: listing(path) for name, path in read.items() if name not in refused},
            "unseen": {name: why for name, folder in request["shared"].items() if (why := unseen(Path(folder)))},
        }

    return look
