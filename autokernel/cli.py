"""What the command lines of the stages share: the parser, `key: value` lines, and one sentence for bad input.

Standard output is a contract of `key: value` lines; progress, warnings and errors go to standard error.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console

from autokernel.errors import InputError

OK, FAILED, BAD_INPUT = 0, 1, 2

# Colour and progress; silent when standard error is no terminal, except for plain lines.
console = Console(stderr=True, highlight=False)


def parser(documentation: str | None) -> argparse.ArgumentParser:
    """A parser whose help is the module's docstring."""
    return argparse.ArgumentParser(description=documentation, formatter_class=argparse.RawDescriptionHelpFormatter)


def run_stage(stage: Callable[[Sequence[str] | None], int]) -> None:
    """Run a stage and exit: its own status, or 2 after one sentence for bad input, or 130 on Ctrl-C."""
    try:
        status = stage(None)
    except InputError as fault:
        print(f"error: {' '.join(str(fault).split())}", file=sys.stderr)
        status = BAD_INPUT
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        status = 130
    sys.exit(status)


def say(key: str, value: Any) -> None:
    """One `key: value` line on standard output."""
    print(f"{key}: {value}", flush=True)


def note(message: str) -> None:
    """One line of progress on standard error."""
    console.print(message, style="dim", markup=False, soft_wrap=True)


def integers(text: str) -> tuple[int, ...]:
    """`1,512` as (1, 512); for argparse."""
    try:
        values = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of integers such as 1,512") from None
    if any(value < 1 for value in values):
        raise argparse.ArgumentTypeError(f"{text!r} has a size below 1")
    return values
