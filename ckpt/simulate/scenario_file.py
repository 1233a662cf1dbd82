"""Scenario files: a Scenario in TOML, and the values of a sweep beside it.

The keys are the fields of `scenario.Scenario`; its levels are tables. Some values have a text form:

    policy = "adaptive" | "every 100 steps" | "every 60 s"      or a table: the arguments of ckpt.Adaptive or ckpt.Every
    peers = "none" | "1 replica" | "2 replicas" | "parity 4+2"  or a table with `option` and `link_bytes_s`
    local = "none", store = "none"                              the level is left out
    rejoin = "restart" | "wanted"

A table [sweep] maps a key, such as "store.write_bytes_s", to the list of its values.
"""

from __future__ import annotations

import difflib
import itertools
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from ckpt.errors import UsageError
from ckpt.placement.placement import Parity, Replicas
from ckpt.policy.adaptive import Adaptive
from ckpt.policy.save_options import Every
from ckpt.simulate.scenario import (
    LocalLevel,
    NoticeModel,
    PeerLevel,
    Rejoin,
    Scenario,
    StoreLevel,
    StorePrices,
)

_NUMBERS = ("int", "float", "int | None", "float | None")
COMBINATIONS_MAX = 100_000
FILE_BYTES_MAX = 1 << 20
Choice = dict[str, Any]  # key -> value, of one combination of a sweep


class ScenarioFile:
    """A scenario with the choices of its sweep. `choices`: one empty choice without a sweep."""

    def __init__(self, values: Mapping[str, Any], name: str) -> None:
        self.name = name
        self._values = {key: value for key, value in values.items() if key != "sweep"}
        sweep = values.get("sweep", {})
        if not isinstance(sweep, dict) or not all(isinstance(each, list) and each for each in sweep.values()):
            raise UsageError(f"{name}: [sweep] maps a key to the list of its values, such as nodes = [8, 16]")
        self.keys = tuple(sweep)
        count = 1
        for each in sweep.values():
            count *= len(each)
        if count > COMBINATIONS_MAX:
            raise UsageError(f"{name}: [sweep] has {count:,} combinations; at most {COMBINATIONS_MAX:,} are run")
        self.choices: list[Choice] = [
            dict(zip(self.keys, each, strict=True)) for each in itertools.product(*sweep.values())
        ]

    def scenario(self, choice: Choice) -> Scenario:
        """The scenario with the values of that choice. Errors: UsageError, which names the key."""
        values = {key: dict(value) if isinstance(value, dict) else value for key, value in self._values.items()}
        try:
            for key, value in choice.items():
                _set(values, key, value)
            return _make_scenario(values)
        except UsageError as exc:
            chosen = f" with {', '.join(f'{key} = {value!r}' for key, value in choice.items())}" if choice else ""
            raise UsageError(f"{self.name}{chosen}: {exc}") from exc


def read_scenario(path: Path) -> ScenarioFile:
    """Reads a file. Every scenario of the sweep is made once, so that a wrong one is refused before the first runs.
    Errors: UsageError."""
    try:
        with path.open("rb") as file:
            content = file.read(FILE_BYTES_MAX + 1)
    except OSError as exc:
        raise UsageError(f"the scenario {path} cannot be read: {exc}") from exc
    if len(content) > FILE_BYTES_MAX:
        raise UsageError(f"{path} is larger than a scenario can be ({FILE_BYTES_MAX >> 20} MiB)")
    try:
        values = tomllib.loads(content.decode("utf-8-sig"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise UsageError(f"{path} is no TOML: {exc}") from exc
    found = ScenarioFile(values, path.name)
    for choice in found.choices:
        found.scenario(choice)
    return found


def _set(values: dict[str, Any], key: str, value: Any) -> None:
    """Errors: UsageError if the key leads through something that is no table."""
    *tables, last = key.split(".")
    at = values
    for name in tables:
        below = at.get(name, {})
        if isinstance(below, str) and name == "peers":
            below = {"option": below}
        if not isinstance(below, dict):
            raise UsageError(f"{key}: {name} is {below!r}, which has no parts")
        at[name] = at = dict(below)
    known = at.get(last)
    if last == "peers" and isinstance(known, dict) and isinstance(value, str) and value != "none":
        # A swept option keeps the rest of the table, such as the speed of the links.
        value = {"option": value}
    if isinstance(known, dict) and isinstance(value, dict) and last != "policy":
        value = {**known, **value}
    at[last] = value


def _make_scenario(values: Mapping[str, Any]) -> Scenario:
    made = {**values}
    for key, make in _PARTS.items():
        if key in made:
            made[key] = make(key, made[key])
    scenario: Scenario = _make(Scenario, "", made)
    return scenario


def _make(kind: Callable[..., Any], key: str, values: Mapping[str, Any]) -> Any:
    """An object of that dataclass. Errors: UsageError."""
    known = [each.name for each in fields(kind)]  # type: ignore[arg-type]
    unknown = sorted(set(values) - set(known))
    where = f"{key}." if key else ""
    if unknown:
        close = difflib.get_close_matches(unknown[0], known, 1)
        hint = f"; did you mean {close[0]}?" if close else f"; there are {', '.join(known)}"
        raise UsageError(f"{where}{unknown[0]} is unknown{hint}")
    for each in fields(kind):  # type: ignore[arg-type]
        value = values.get(each.name)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if each.type in _NUMBERS and value is not None and not is_number:
            raise UsageError(
                f"{where}{each.name} = {value!r}: give a number, without a unit: bytes as 20e9, seconds as 1.5"
            )
    try:
        return kind(**values)
    except UsageError as exc:
        raise UsageError(f"{where}{exc}" if key else str(exc)) from exc
    except TypeError as exc:
        missing = re.findall(r"'(\w+)'", str(exc).partition("missing")[2])
        text = f"{', '.join(missing)} must be given" if missing else str(exc)
        raise UsageError(f"{where}{text}") from exc


def _level(kind: type[Any]) -> Callable[[str, Any], Any]:
    def make(key: str, value: Any) -> Any:
        if value == "none":
            return None
        if not isinstance(value, dict):
            raise UsageError(f'{key} = {value!r}: a table, or "none"')
        parts = {**value}
        if "prices" in parts:
            parts["prices"] = _table(StorePrices)(f"{key}.prices", parts["prices"])
        return _make(kind, key, parts)

    return make


def _table(kind: type[Any]) -> Callable[[str, Any], Any]:
    def make(key: str, value: Any) -> Any:
        if not isinstance(value, dict):
            raise UsageError(f"{key} = {value!r}: a table")
        return _make(kind, key, value)

    return make


def _peers(key: str, value: Any) -> PeerLevel | None:
    if value == "none":
        return None
    parts = {"option": value} if isinstance(value, str) else value
    if not isinstance(parts, dict):
        raise UsageError(f'{key} = {value!r}: a table, "none", "1 replica" or "parity 4+2"')
    parts = {**parts}
    if parts.get("option") == "none":
        return None
    if "option" in parts:
        parts["option"] = _peer_option(f"{key}.option", parts["option"])
    made: PeerLevel = _make(PeerLevel, key, parts)
    return made


def _peer_option(key: str, value: Any) -> Replicas | Parity:
    text = str(value)
    if found := re.fullmatch(r"(\d{1,4}) replicas?", text):
        return Replicas(int(found[1]))
    if found := re.fullmatch(r"parity (\d{1,4})\+(\d{1,2})", text):
        return Parity(int(found[1]), int(found[2]))
    raise UsageError(f'{key} = {value!r}: "none", "1 replica" or "parity 4+2"')


def _policy(key: str, value: Any) -> Every | Adaptive:
    if isinstance(value, dict):
        kind = Every if set(value) & {"steps", "seconds"} else Adaptive
        made: Every | Adaptive = _make(kind, key, value)
        return made
    text = str(value)
    if text == "adaptive":
        return Adaptive()
    if found := re.fullmatch(r"every (\d{1,12}) steps?", text):
        return Every(steps=int(found[1]))
    if found := re.fullmatch(r"every (\d{1,12}(?:\.\d+)?) s", text):
        return Every(seconds=float(found[1]))
    raise UsageError(f'{key} = {value!r}: "adaptive", "every 100 steps" or "every 60 s"')


def _rejoin(key: str, value: Any) -> Rejoin:
    found = {"restart": Rejoin.AT_RESTART, "wanted": Rejoin.AT_WANTED}.get(value if isinstance(value, str) else "")
    if found is None:
        raise UsageError(f'{key} = {value!r}: "restart" or "wanted"')
    return found


_PARTS: dict[str, Callable[[str, Any], Any]] = {
    "local": _level(LocalLevel),
    "store": _level(StoreLevel),
    "peers": _peers,
    "notices": _table(NoticeModel),
    "policy": _policy,
    "rejoin": _rejoin,
}


def choice_texts(choice: Choice) -> Iterator[str]:
    """The values of a choice as cells of a table."""
    for value in choice.values():
        if isinstance(value, dict):
            yield ", ".join(f"{name} {each}" for name, each in value.items())
        else:
            yield f"{value:g}" if isinstance(value, float) else str(value)
