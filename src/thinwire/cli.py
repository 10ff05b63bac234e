"""The command `thinwire`: what a user types, and what comes back.

Exit status: 0 done, 1 failed, 2 wrong usage, 130 interrupted. An error is one line on stderr, with its
traceback before it where the environment variable THINWIRE_DEBUG is set. With --json stdout holds one JSON
object and nothing else. torch is imported only by the commands that need it.
"""

import argparse
import functools
import json
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, NoReturn, TextIO

from thinwire import codec_commands
from thinwire import commands as run
from thinwire.commands import FAILED, INTERRUPTED, USAGE, Result
from thinwire.core.errors import RunFailure, UserError
from thinwire.train.places import did_you_mean
from thinwire.train.signals import follow_parent
from thinwire.train.streams import forgiving, open_standard_descriptors, results_apart

_DEBUG = "THINWIRE_DEBUG"
_SETTINGS = (
    "Any setting of the recipe can be given as --table.key VALUE, such as --steps 20 --model.stages 3."
)


@dataclass
class _Command:
    """One subcommand: its parser, the options it knows, and whether recipe settings may be added."""

    parser: argparse.ArgumentParser
    run: Callable[[argparse.Namespace], Result]
    takes_settings: bool = False
    flags: dict[str, bool] = field(default_factory=dict)

    def option(self, *names: str, **details: Any) -> None:
        """Add an option and remember whether it takes a value."""
        action = self.parser.add_argument(*names, **details)
        self.flags |= dict.fromkeys(action.option_strings, action.nargs != 0)


class _OneLineParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; see {self.prog} --help")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    open_standard_descriptors()
    follow_parent()
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # two threads ran ten times slower on small shared machines
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    as_json = "--json" in arguments
    try:
        command, options = _parse(arguments)
    except UserError as error:
        return _complain(str(error), USAGE, sys.stdout if as_json else None)
    with results_apart(for_good=argv is None) as stdout:
        return _answer(command, options, as_json, stdout)


def _answer(
    command: Callable[[argparse.Namespace], Result],
    options: argparse.Namespace,
    as_json: bool,
    stdout: TextIO | None,
) -> int:
    """Run the command, print its result, and turn every exception into one line and an exit status."""
    on_error = stdout if as_json else None
    options.stdout = stdout  # for the one command that draws on it while it runs
    try:
        result = command(options)
        try:
            _print(json.dumps(result.value, indent=1) if as_json else result.text, stdout)
        except BrokenPipeError:  # the reader hung up: no more to say
            return FAILED
        return result.exit_status
    except UserError as error:
        return _complain(str(error), USAGE, on_error)
    except RunFailure as error:
        return _complain(str(error), FAILED, on_error)
    except KeyboardInterrupt as error:
        return _complain(f"interrupted: {error}" if str(error) else "interrupted", INTERRUPTED, on_error)
    except OSError as error:
        return _complain(str(error), FAILED, on_error)
    except (Exception, SystemExit) as error:
        text = f"unexpected {type(error).__name__}: {error}; set {_DEBUG}=1 to see where it came from"
        return _complain(text, FAILED, on_error)


def _print(text: str, stdout: TextIO | None) -> None:
    if text and stdout is not None:
        print(text, file=stdout, flush=True)


def _complain(message: str, exit_status: int, stdout: TextIO | None) -> int:
    """One line on stderr, after the traceback where THINWIRE_DEBUG asks for it; one object on `stdout`."""
    stderr = forgiving(sys.stderr)
    if os.environ.get(_DEBUG):
        traceback.print_exc(file=stderr)
    line = " ".join(message.split())
    print(f"thinwire: {line}", file=stderr, flush=True)
    with suppress(OSError):  # a stdout that cannot be written: the status has to do
        _print(json.dumps({"error": line, "exit_status": exit_status}), stdout)
    return exit_status


def _parse(
    arguments: Sequence[str],
) -> tuple[Callable[[argparse.Namespace], Result], argparse.Namespace]:
    """The command and its options; options.settings holds what else was given, as --key=value."""
    _refuse_undecodable(arguments)
    parser, commands = _parsers()
    words = [argument for argument in arguments if not argument.startswith("-")]
    named = next((commands[name] for name in (" ".join(words[:2]), *words[:1]) if name in commands), None)
    settings: list[str] = []
    if named is not None and named.takes_settings:
        arguments, settings = _take_settings(arguments, named)
    options = parser.parse_args(arguments)
    command = commands[f"{options.command} {options.action}" if "action" in options else options.command]
    options.settings, options.known_options = settings, list(command.flags)
    return command.run, options


def _refuse_undecodable(arguments: Sequence[str]) -> None:
    """Bytes that are no text in this locale reach Python as surrogates, which no file of a run can hold."""
    for argument in arguments:
        try:
            argument.encode("utf-8")
        except UnicodeEncodeError:
            encoding = sys.getfilesystemencoding()
            raise UserError(
                f"{argument!a} is not text in this locale ({encoding}); set PYTHONUTF8=1, or give UTF-8"
            ) from None


def _take_settings(arguments: Sequence[str], command: _Command) -> tuple[list[str], list[str]]:
    """Split off what is no option of the command as --key=value settings; a value may start with '-'."""
    own, settings, rest = [], [], list(arguments)
    while rest:
        argument = rest.pop(0)
        name, equals, _ = argument.partition("=")
        if name in command.flags or not argument.startswith("--") or argument == "--":
            own.append(argument)
            if command.flags.get(name) and not equals and rest and not rest[0].startswith("--"):
                own.append(rest.pop(0))
        elif equals:
            settings.append(argument)
        elif rest and not rest[0].startswith("--"):
            settings.append(f"{argument}={rest.pop(0)}")
        else:
            raise UserError(f"{argument} needs a value{did_you_mean(argument, command.flags)}")
    return own, settings


def _parsers() -> tuple[argparse.ArgumentParser, dict[str, _Command]]:
    parser = _OneLineParser(
        prog="thinwire",
        allow_abbrev=False,
        description="Reinforcement learning of language models over thin wires.",
    )
    parser.add_argument("--version", action="version", version=f"thinwire {metadata.version('thinwire')}")
    group = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command", required=True)
    commands: dict[str, _Command] = {}

    def add(
        name: str,
        run: Callable[[argparse.Namespace], Result],
        about: str,
        takes_settings: bool,
        family: tuple[str, Any] = ("", group),
    ) -> _Command:
        epilog = _SETTINGS if takes_settings else None
        child = family[1].add_parser(name, help=about, description=about, epilog=epilog, allow_abbrev=False)
        command = _Command(child, run, takes_settings, {"-h": False, "--help": False})
        command.option("--json", action="store_true", help="print one JSON object on stdout, nothing else")
        commands[f"{family[0]} {name}".strip()] = command
        return command

    train = add("train", run.train, "One run of a recipe.", True)
    train.parser.add_argument("recipe", nargs="?", help="a TOML file, or the name of a recipe of the package")
    train.option("--out", type=Path, help="the run's directory; default runs/NAME-N")
    train.option("--arm", help="lay the table [arms.ARM] over the recipe")
    train.option("--resume", metavar="DIR|latest", help="go on with an interrupted run (latest: under runs/)")
    train.option("--check", action="store_true", help="resolve and estimate only: no weights, no training")
    compare = add(
        "compare", run.compare, "Arms x seeds in parallel processes, one summary, one report.", True
    )
    compare.parser.add_argument(
        "recipe", help="a TOML file with [arms.NAME] tables, or a name of the package's"
    )
    compare.option("--arms", type=_names, default=[], help="A,B,...; default all")
    compare.option("--seeds", type=_whole_numbers, default=[], help="1,2,...; default the recipe's")
    compare.option(
        "--at",
        type=_whole_numbers,
        default=[],
        help="steps whose readings summary.json holds; default quarter marks",
    )
    compare.option("--jobs", type=int, default=2, help="processes at a time (default 2)")
    compare.option("--out", type=Path, help="default runs/NAME-compare-N; the same one again goes on")
    compare.option(
        "--vary", action="append", default=[], metavar="PREFIX", help="settings that may differ too"
    )
    report = add("report", run.report, "One HTML page of runs and comparisons.", False)
    report.parser.add_argument(
        "directories", type=Path, nargs="+", metavar="DIR", help="the --out of train, compare or demo"
    )
    report.option("--out", type=Path, help="default DIR/report.html, or report.html here for several DIR")
    watch = add("watch", run.watch, "A live view of a run or a comparison; Ctrl-C leaves it.", False)
    watch.parser.add_argument("directory", type=Path, help="the --out of train, compare or demo")
    watch.option("--every", type=float, default=2.0, metavar="SECONDS", help="between two looks (default 2)")
    watch.option("--once", action="store_true", help="print one frame and exit")
    movement = add("movement", run.movement, "How far weights have moved from a base, block by block.", False)
    movement.parser.add_argument(
        "base", metavar="BASE", help="model folder, .safetensors, .gguf, embedded, package:NAME, or a run"
    )
    movement.parser.add_argument(
        "checkpoints", nargs="+", metavar="CHECKPOINT", help="the same, or RUN/checkpoints/step-N"
    )
    analyze = add("analyze", run.analyze, "Is a run stable? Statistics and a verdict from any log.", False)
    analyze.parser.add_argument("logs", nargs="+", type=Path, metavar="FILE|RUN", help="logs or directories")
    analyze.option(
        "--series", action="append", default=[], metavar="KEY", help="show only this one; repeatable"
    )
    analyze.option(
        "--window", type=_window, default=(None, None), metavar="FIRST:LAST", help="the steps to judge"
    )
    analyze.option("--bound", type=float, metavar="X", help="project when the gap reaches X")
    analyze.option("--slope", type=float, metavar="X", help="the smallest slope of the gap that matters")
    demo = add("demo", run.demo, "The embedded default: four arms, one report.", True)
    demo.option("--quick", action="store_true", help="40 steps instead of 200")
    demo.option("--out", type=Path, help="default runs/demo-N; the same one again goes on")
    demo.option("--seed", type=int, help="default the recipe's")
    demo.option("--jobs", type=int, default=2, help="processes at a time (default 2)")
    about = "What the codecs are called, take and cost; what they do to a model's own tokens."
    family = group.add_parser("codecs", help=about, description=about, allow_abbrev=False)
    actions = family.add_subparsers(title="actions", metavar="ACTION", dest="action", required=True)
    codec_commands.declare(functools.partial(add, family=("codecs", actions)))
    return parser, commands


def _names(text: str) -> list[str]:
    return [name for part in text.split(",") if (name := part.strip())]


def _window(text: str) -> tuple[int | None, int | None]:
    first, colon, last = text.partition(":")
    try:
        if not colon:
            raise ValueError
        return int(first) if first.strip() else None, int(last) if last.strip() else None
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no range of steps such as 100:600 or 100:") from None


def _whole_numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in _names(text)]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of whole numbers such as 1,2,3") from None
