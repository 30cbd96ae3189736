"""How an option is written: a dataclass field with its default and what can be said of its value alone; and what every
group of options can do.

What stands beside a field is read through catalogue.py: bounds and choices by checks.py and help, and so is what an
option needs to have an effect. What several options say together is said by the `check` of their group.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Literal, cast

Place = Literal["path", "model"]


@dataclass(frozen=True)
class Limits:
    """The values that make sense. None makes sense wherever it is a value at all."""

    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None
    choices: tuple[Any, ...] = ()
    steps: bool = False
    """A number of steps above 0, or -1."""

    def complaint(self, value: Any) -> str | None:
        """What is wrong with the value, to follow the option's name."""
        for one in value if isinstance(value, tuple) else (value,):
            if not self._allow(one):
                shown = f"{one:g}" if isinstance(one, int | float) else one
                return f"has {shown}: each must be {self}" if one is not value else f"is {shown}: it must be {self}"
        return None

    def _allow(self, value: Any) -> bool:
        return value is None or (
            (self.at_least is None or value >= self.at_least)
            and (self.above is None or value > self.above)
            and (self.at_most is None or value <= self.at_most)
            and (self.below is None or value < self.below)
            and (not self.choices or value in self.choices)
            and (not self.steps or value >= 1 or value == -1)
        )

    def __str__(self) -> str:
        if self.steps:
            return "a number of steps above 0, or -1"
        if len(self.choices) > 6:
            return f"one of {', '.join(self.choices)}"
        if self.choices:
            *others, last = map(str, self.choices)
            return f"{', '.join(others)} or {last}" if others else last
        if self.at_least is not None and self.at_most is not None:
            return f"between {self.at_least:g} and {self.at_most:g}"
        bounds = {"at least": self.at_least, "above": self.above, "at most": self.at_most, "below": self.below}
        return " and ".join(f"{words} {bound:g}" for words, bound in bounds.items() if bound is not None)


def option(
    default: Any,
    *,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
    choices: Iterable[Any] | Mapping[Any, str] = (),
    place: Place | None = None,
    needs: str | tuple[str, Any] | None = None,
    refused: str | None = None,
    always: bool = False,
    addresses: bool = False,
) -> Any:
    """An option with its bounds or choices; of a tuple, those of each value. Options without any are plain defaults.

    `choices` that are a mapping: to what each is called, which help says behind it. `place`: a hub name, or a local
    path that must exist; models are separated by commas. `needs`: the option without which, or the option and the value
    without which, this one has no effect. `refused`: why every value but the default is. `always`: a switch for what is
    always done here. `addresses`: addresses of servers, separated by commas, may be among its values; their credentials
    are shown nowhere.
    """
    limits = Limits(at_least, above, at_most, below, tuple(choices))
    metadata: dict[str, Any] = {"limits": limits, "place": place, "needs": needs, "refused": refused, "always": always}
    metadata |= {"addresses": addresses, "called": dict(choices) if isinstance(choices, Mapping) else {}}
    return field(default=default, repr=not addresses, metadata=metadata)


def every(default: int) -> Any:
    """An option for what happens every so many steps, or with -1 never."""
    return field(default=default, metadata={"limits": Limits(steps=True)})


def of_this_call(default: Any, *, above: float | None = None) -> Any:
    """An option about this call, not about the run: not in the resolved config, and equal runs may differ in it."""
    return field(default=default, compare=False, metadata={"of_this_call": True, "limits": Limits(above=above)})


def secret(default: Any, bare: str | None = None) -> Any:
    """An option whose value may be a key, shown nowhere; standing alone, or true in YAML, it has the value `bare`: then
    the key comes from the environment."""
    return field(default=default, repr=False, metadata={"secret": True, "bare": bare})


def required(shown: str, what: str, place: Place | None = None) -> Any:
    """An option without which its job cannot start: `shown` stands for its value in the usage line, `what` says in
    words what to give. Whatever its type says, it is None until it is set, which check refuses."""
    return field(default=None, metadata={"required": (shown, what), "place": place})


@dataclass(frozen=True, kw_only=True)
class Options:
    """What every group of options is."""

    given: frozenset[str] = field(default=cast(Any, None), compare=False, repr=False, metadata={"no_option": True})
    """Names of the options that the user set, some of them perhaps to their defaults. Made in Python, options count as
    set where they differ from their defaults."""

    idle_here: ClassVar[Mapping[str, str]] = {}
    """Options that never have an effect in the job, and why: what follows `has no effect`."""

    def __post_init__(self) -> None:
        if self.given is None:
            names = frozenset(known.name for known in fields(self) if self.changed(known.name))
            object.__setattr__(self, "given", names)

    def settle(self, changes: dict[str, Any]) -> Iterable[str]:
        """Put into `changes` what the group's options leave open; a line for each value that is set aside."""
        return ()

    def check(self) -> Iterable[str]:
        """Refuse (UserError) what the group's options cannot mean together; a line for what they probably do not."""
        return ()

    def may_lack(self, name: str) -> bool:
        """Whether these options do without one that their job cannot start without else."""
        return False

    def changed(self, name: str) -> bool:
        """Whether an option is not at its default."""
        known = type(self).__dataclass_fields__[name]
        return "no_option" not in known.metadata and getattr(self, name) != known.default

    def asks(self, name: str) -> bool:
        """Whether the job has this option and the user set it to anything but off."""
        if name not in self.given:
            return False
        value, limits = getattr(self, name), type(self).__dataclass_fields__[name].metadata.get("limits")
        return value is not None and value is not False and not (limits is not None and limits.steps and value == -1)

    def idle(self, names: Iterable[str], why: str) -> list[str]:
        """A line for each of these options that the user set."""
        return [f"--{name} has no effect {why}" for name in names if self.asks(name)]
