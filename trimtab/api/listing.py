"""The options of a job, to look at in a session: `trimtab.options("grpo")`."""

from collections.abc import Iterator, Mapping
from html import escape
from itertools import groupby
from typing import Any

from trimtab.config.jobs import JOBS
from trimtab.config.option import Option, options_of
from trimtab.errors import UserError


class OptionList(Mapping[str, Any]):
    """A job's options and their defaults: a mapping, which shows itself as a table."""

    def __init__(self, verb: str, containing: str = ""):
        self.verb = verb
        known = options_of(JOBS[verb]).values()
        self._options = {option.name: option for option in known if containing in f"{option.name} {option.help}"}

    def __getitem__(self, name: str) -> Any:
        return self._options[name].default

    def __iter__(self) -> Iterator[str]:
        return iter(self._options)

    def __len__(self) -> int:
        return len(self._options)

    def help(self, name: str) -> str:
        """What the option does."""
        return self._options[name].help

    def _sections(self) -> Iterator[tuple[str, list[Option]]]:
        for section, found in groupby(self._options.values(), key=lambda option: option.section):
            yield section, list(found)

    def __repr__(self) -> str:
        width = max(map(len, self._options), default=0)
        lines = [f"options of trimtab {self.verb}"]
        for section, found in self._sections():
            lines += ["", section]
            lines += [f"  {option.name:<{width}}  {_default(option)}: {option.help}" for option in found]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        rows = ""
        for section, found in self._sections():
            rows += f"<tr><th colspan=3 style='text-align:left'>{escape(section)}</th></tr>"
            for option in found:
                cells = (f"<code>{option.name}</code>", f"<code>{escape(_default(option))}</code>", escape(option.help))
                rows += "<tr>" + "".join(f"<td style='text-align:left'>{cell}</td>" for cell in cells) + "</tr>"
        return f"<table>{rows}</table>"


def options(verb: str, containing: str = "") -> OptionList:
    """The options of a job, with their defaults and what they do; `containing`: only those with this word."""
    if verb not in JOBS:
        raise UserError(f"options: there is no job {verb!r}; the jobs are {', '.join(JOBS)}")
    return OptionList(verb, containing)


def _default(option: Option) -> str:
    return "required" if option.required else repr(option.default)
