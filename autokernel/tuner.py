"""The built-in agent: it varies the constants that a kernel declares tunable. No model, no network. Imports no stage.

A kernel declares a constant tunable at its top, with the choices beside it; what follows a semicolon is for people:

    TILE = 4096  # tune: [1024, 2048, 4096, 8192]; elements per program

The search is a local one on a model of what is known. Every version tried so far that differs from the kept one in such
constants alone is an observation of log(speed / speed of the kept one), and an additive model, one effect for each value of
each constant, is fitted to all of them by ridge regression: a value never tried has no effect, one that failed a large
negative one. Next is the best predicted of the versions that change one constant of the kept one, of equals the nearest
choice; when all of those were tried, or are predicted hopeless, the best predicted that changes two; then nothing.
"""

import ast
import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from autokernel.errors import InputError

RIDGE = 0.25  # how far one observation is believed: an effect seen once counts 1 / (1 + RIDGE)
FAILED = -1.0  # log of the relative speed that a version which did not pass counts with
HOPELESS = math.log(0.7)  # predicted slower than this, a version is not tried

_LINE = re.compile(r"^(?P<name>[A-Z]\w*) = (?P<value>[^#\n]*?)  # tune: (?P<choices>\[[^\]\n]*\])(?:; .*)?$", re.MULTILINE)
_MARK = re.compile(r"^.*# tune:.*$", re.MULTILINE)


@dataclass(frozen=True)
class Tunable:
    """A constant at the top of a kernel: its value now, and those that it may have."""

    name: str
    value: Any
    choices: tuple[Any, ...]
    start: int  # where the value stands in the text
    end: int


@dataclass(frozen=True)
class Attempt:
    """A version that was judged."""

    text: str
    speedup: float | None  # over PyTorch; None: it did not pass, or was not timed


@dataclass(frozen=True)
class Proposal:
    """The next version to try, and what it changes in the kept one."""

    text: str
    description: str


@lru_cache(maxsize=4096)  # a search asks again and again for the same versions
def tunables(text: str) -> tuple[Tunable, ...]:
    """The tunable constants in the order of the file; InputError names a line that cannot be read."""
    found = []
    for mark in _MARK.finditer(text):
        match = _LINE.fullmatch(mark.group())
        number = text.count("\n", 0, mark.start()) + 1
        try:
            if match is None:
                raise ValueError
            value, choices = ast.literal_eval(match["value"]), tuple(ast.literal_eval(match["choices"]))
        except (ValueError, SyntaxError):
            raise InputError(
                f"line {number} of the kernel is no tunable constant: write it as `TILE = 64  # tune: [32, 64]; what it is`"
            ) from None
        if value not in choices:
            raise InputError(
                f"line {number} of the kernel sets {match['name']} to {value!r}, which is not among its choices: add it"
            )
        start = mark.start() + match.start("value")
        found.append(Tunable(match["name"], value, choices, start, start + len(match["value"])))
    return tuple(found)


def with_values(text: str, values: Mapping[str, Any]) -> str:
    """The text with other values of some of its tunable constants."""
    for tunable in reversed(tunables(text)):
        if tunable.name in values:
            text = text[: tunable.start] + repr(values[tunable.name]) + text[tunable.end :]
    return text


def propose(kept: str, attempts: Sequence[Attempt]) -> Proposal | None:
    """The next version to try, given the kept one and all that were tried; None when nothing promising is left."""
    constants = tunables(kept)
    here = {constant.name: constant.value for constant in constants}
    tried = {attempt.text for attempt in attempts} | {kept}
    effects = _effects(kept, here, attempts)
    for count in (1, 2):
        untried = [change for change in _changes(constants, count) if with_values(kept, change) not in tried]
        hopeful = [change for change in untried if _predicted(effects, change) > HOPELESS]
        if hopeful:
            distances = {c.name: {v: abs(i - c.choices.index(c.value)) for i, v in enumerate(c.choices)} for c in constants}
            best = min(
                hopeful,
                key=lambda change: (
                    -round(_predicted(effects, change), 3),
                    sum(distances[name][value] for name, value in change.items()),
                ),
            )
            description = ", ".join(f"{name} {here[name]} -> {value}" for name, value in best.items())
            return Proposal(with_values(kept, best), description)
    return None


def _changes(constants: Sequence[Tunable], count: int) -> Iterator[dict[str, Any]]:
    for chosen in itertools.combinations(constants, count):
        others = [[value for value in constant.choices if value != constant.value] for constant in chosen]
        for values in itertools.product(*others):
            yield dict(zip((constant.name for constant in chosen), values, strict=True))


def _predicted(effects: Mapping[tuple[str, Any], float], change: Mapping[str, Any]) -> float:
    return sum(effects.get(item, 0.0) for item in change.items())


def _effects(kept: str, here: Mapping[str, Any], attempts: Sequence[Attempt]) -> dict[tuple[str, Any], float]:
    """(constant, value) -> log of the relative speed that it is believed to give in place of the kept value."""
    skeleton = _skeleton(kept)
    speed = max((a.speedup for a in attempts if a.text == kept and a.speedup), default=None)
    seen: list[tuple[list[tuple[str, Any]], float]] = []
    for attempt in attempts:
        if attempt.text == kept or _skeleton(attempt.text) != skeleton:
            continue
        change = [(c.name, c.value) for c in tunables(attempt.text) if c.value != here[c.name]]
        if attempt.speedup:
            seen.append((change, math.log(attempt.speedup / speed) if speed else 0.0))
        else:
            seen.append((change, FAILED))
    items = sorted({item for change, _ in seen for item in change}, key=repr)
    if not items:
        return {}
    place = {item: number for number, item in enumerate(items)}
    table, gains = np.zeros((len(seen), len(items))), np.array([gain for _, gain in seen])
    for row, (change, _) in enumerate(seen):
        table[row, [place[item] for item in change]] = 1.0
    fitted = np.linalg.solve(table.T @ table + RIDGE * np.eye(len(items)), table.T @ gains)
    return {item: float(fitted[number]) for item, number in place.items()}


def _skeleton(text: str) -> tuple[str, ...] | None:
    # the text without the values; None if it has other tunable constants, or damaged ones
    try:
        constants = tunables(text)
    except InputError:
        return None
    places = [0, *itertools.chain.from_iterable((c.start, c.end) for c in constants), len(text)]
    return tuple(text[start:end] for start, end in zip(places[::2], places[1::2], strict=True))
