"""Options to YAML that `--config` reads back to equal options, and the removal of keys from any text."""

import os
from itertools import groupby
from typing import Any

import yaml

from trimtab.config.catalogue import options_of
from trimtab.config.credentials import credentials, without_credentials
from trimtab.config.groups import CallOptions
from trimtab.config.option import Options
from trimtab.config.values import REDACTED

MARK = "# trimtab "
"""How a resolved config begins."""
_HARMLESS = {None, "True", "online", "offline"}
_SECRET_VARIABLES = ("WANDB_API_KEY", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "TRIMTAB_BEARER_TOKEN")
# Shorter than any real key; hiding such a word would only make the text unreadable.
_SHORTEST_KEY = 6


def to_dict(options: Options) -> dict[str, Any]:
    """The resolved options of a run by name, in plain types and without keys or what concerns this call only."""
    return {
        name: _plain(shown(options, name))
        for name, option in options_of(type(options)).items()
        if not option.of_this_call
    }


def shown(options: Options, name: str) -> Any:
    """An option's value as it may be written and read again: what a key stood for is then in the environment."""
    value, option = getattr(options, name), options_of(type(options))[name]
    if option.secret and _is_key(value):
        return option.bare
    if option.addresses and value:
        return ",".join(map(without_credentials, value.split(",")))
    return value


def to_yaml(options: CallOptions) -> str:
    """The same under the headings of `--help`."""
    described = options_of(type(options))
    values = to_dict(options)
    text = f"{MARK}{options.verb}\n"
    for section, names in groupby(values, key=lambda name: described[name].section):
        block = {name: values[name] for name in names}
        text += f"\n# {section}\n" + yaml.dump(
            block, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=1_000_000, default_flow_style=False
        )
    return text


def redact(text: str, options: Options | None = None) -> str:
    """The text without the keys that the options or the environment hold."""
    for key in secrets_of(options):
        text = text.replace(key, REDACTED)
    return text


def secrets_of(options: Options | None = None) -> list[str]:
    """Values that must not be shown, longest first."""
    found = {os.environ.get(name, "") for name in _SECRET_VARIABLES}
    if options is not None:
        for name, option in options_of(type(options)).items():
            value = getattr(options, name)
            if option.secret and _is_key(value):
                found.add(value)
            if option.addresses and value:
                found |= credentials(value)
    return sorted((key for key in found if len(key) >= _SHORTEST_KEY), key=len, reverse=True)


def _is_key(value: Any) -> bool:
    return value not in _HARMLESS


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


class _Dumper(yaml.SafeDumper):
    pass


def _string(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    # A template on one line, with its \n visible, reads better than YAML's folded blocks.
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"' if "\n" in text else None)


_Dumper.add_representer(str, _string)
_Dumper.add_representer(
    list, lambda dumper, items: dumper.represent_sequence("tag:yaml.org,2002:seq", items, flow_style=True)
)
