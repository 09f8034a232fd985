"""The command line: train, evaluate, compare and look.

    mirrorquant train                                             a binary network on handwritten digits, in seconds
    mirrorquant train cifar10/resnet18/binary/md-tanh-s           a cell of the paper's tables
    mirrorquant train cifar10/resnet18/binary/bc lr=0.01 seed=1   the same with something changed
    mirrorquant train --resume runs/NAME                          continue a run
    mirrorquant compare --seeds 3                                 float, BinaryConnect and MD-tanh-S side by side
    mirrorquant reproduce binary                                  every cell of a table of the paper
    mirrorquant search --over lr=0.1,0.01                         hyperparameters, by validation accuracy
    mirrorquant eval runs/NAME                                    the best rounded network of a run, on the test set
    mirrorquant recipes cifar10/resnet18                          the recipes of that task, or the keys of one recipe
    mirrorquant pack runs/NAME                                    that network at one bit per weight, in a file
    mirrorquant export runs/NAME --to onnx                        the same for other runtimes

Exit codes: 0 done; 1 a problem that the message explains; 2 wrong usage; 130 and 143 interrupted, with a checkpoint.
"""

from __future__ import annotations

import argparse
import io
import sys
import warnings
from collections.abc import Sequence
from typing import Any, NoReturn

from mirrorquant._registry import suggestion
from mirrorquant._text import printable
from mirrorquant._version import __version__
from mirrorquant.cli import files, reproduce, runs, search
from mirrorquant.errors import MirrorquantError
from mirrorquant.train import Interrupted
from mirrorquant.train.config import KEYS

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit code; a problem is reported in one line."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal without Unicode shows β as ?
    warnings.filterwarnings("ignore", "TensorFloat32 tensor cores")  # precision=float32 means it
    if "" not in sys.path:
        sys.path.append("")  # for custom models in the current folder
    parser, commands = _parser()
    try:
        options = _parse(list(sys.argv[1:] if arguments is None else arguments), parser, commands)
        options.run(options)
        return 0
    except BrokenPipeError:
        return 0
    except (Exception, KeyboardInterrupt) as error:
        code, message = _explained(error)
        print(f"mirrorquant: {message}", file=sys.stderr)
        return code


class _UsageError(Exception):
    """A command line that makes no sense."""


class _Parser(argparse.ArgumentParser):
    """Explains a wrong command line in one line, too."""

    def error(self, message: str) -> NoReturn:
        """Raises :class:`_UsageError` instead of printing the usage and exiting."""
        raise _UsageError(f"{message}. See {self.prog} --help")


def _explained(error: BaseException) -> tuple[int, str]:
    """Exit code and message of a problem that the user can solve; any other is raised again."""
    if isinstance(error, _UsageError):
        return 2, str(error)
    if isinstance(error, Interrupted):
        return 128 + error.number, str(error)
    if isinstance(error, KeyboardInterrupt):
        return 130, "interrupted"
    if isinstance(error, MirrorquantError):
        return 1, printable(str(error))  # it may quote a stranger's file
    if isinstance(error, OSError):
        return 1, f"{error.filename or 'the output'} cannot be read or written ({error.strerror})"
    if isinstance(error, MemoryError):
        return 1, "there is not enough memory for this"
    raise error


def _parse(given: list[str], parser: argparse.ArgumentParser, commands: list[str]) -> argparse.Namespace:
    """The options of a command; if it takes key=value, these are ``overrides``, and ``word`` may precede them."""
    if not given:
        parser.print_help()
        raise _UsageError("name a command")
    if not given[0].startswith("-") and given[0] not in commands:
        raise _UsageError(f"There is no command {given[0]!r}.{suggestion(given[0], commands)} See --help.")
    options, unknown = parser.parse_known_args(given)
    takes_keys, others, options.overrides = "words" in options, list[str](), list[str]()
    for word in [*getattr(options, "words", ()), *unknown]:
        name, equals, value = word.partition("=")
        key = name.lstrip("-").replace("-", "_")
        if takes_keys and not name:
            raise _UsageError(f"{word!r} is not a key=value pair: write it without spaces, as in lr=0.01")
        if takes_keys and name.startswith("-") and key in KEYS:
            raise _UsageError(f"there is no option {name}: write {key}={value or 'VALUE'}")
        (options.overrides if takes_keys and equals and not name.startswith("-") else others).append(word)
    if len(others) > takes_keys or any(word.startswith("-") for word in others):
        parser.error(f"unrecognized arguments: {' '.join(unknown or others[1:])}")
    options.word = "".join(others)
    return options


def _parser() -> tuple[argparse.ArgumentParser, list[str]]:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = _Parser("mirrorquant", description=__doc__, formatter_class=formatter)
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(metavar="COMMAND", title="commands")

    def command(name: str, run: Any, example: str = "", *, json: bool = True) -> argparse.ArgumentParser:
        about = f"{run.__doc__}\n\n    mirrorquant {name} {example}".rstrip()
        sub = commands.add_parser(name, help=run.__doc__, description=about, formatter_class=formatter)
        sub.set_defaults(run=run)
        if json:
            sub.add_argument("--json", action="store_true", help="print JSON")
        return sub

    for module in (runs, reproduce, search, files):
        module.add_commands(command)
    return parser, list(commands.choices)
