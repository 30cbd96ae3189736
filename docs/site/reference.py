"""A hook of mkdocs: the reference of what `import trimtab` offers, one entry for each public name."""

from __future__ import annotations

from typing import TYPE_CHECKING

import trimtab

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files


def page() -> str:
    names = trimtab._PLACES  # more than __all__: a star does not bring `open`
    opening = "# Python reference\n\nWhat `import trimtab` offers. Importing it loads nothing heavy.\n"
    return opening + "".join(f"\n::: trimtab.{name}\n" for name in names)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    from mkdocs.structure.files import File

    files.append(File.generated(config, "reference.md", content=page()))
    return files


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    config.nav.append({"Python": ["python.md", "reference.md"]})
    return config
