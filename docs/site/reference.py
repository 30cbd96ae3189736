"""A hook of mkdocs: the reference of what `import trimtab` offers, one entry for each public name."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import trimtab

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files

GUIDES = ("python.md", "learner.md")
"""Pages that explain what the reference lists."""


def page() -> str:
    names = trimtab._PLACES  # more than __all__: a star does not bring `open`
    opening = (
        "# Python reference\n\nWhat `import trimtab` offers. Importing it loads nothing heavy. A job's `**options` are "
        "those of its [command](commands/index.md), without the dashes.\n"
    )
    return opening + "".join(f"\n::: trimtab.{name}\n" for name in names)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    from mkdocs.structure.files import File

    files.append(File.generated(config, "reference.md", content=page()))
    return files


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    guides = [name for name in GUIDES if (Path(config.docs_dir) / name).is_file()]
    config.nav.append({"Python": [*guides, "reference.md"]})
    return config
