"""The `meshwright` command. One file a command; a command's module is imported only when that command is called."""

from __future__ import annotations

import importlib
import io
import os
import sys
from typing import Any

__all__ = ["main"]

COMMANDS = {
    "train": "Train a model: text in, checkpoints and a report out.",
    "verify": "Every layout against one device: loss, gradients, weights.",
    "launch": "Run a script of your own on every device.",
    "evaluate": "Loss, perplexity and accuracy of a run on other data.",
    "generate": "Continue a prompt with a trained model.",
    "serve": "Answer over HTTP: completions, chat, embeddings, classes, masks.",
    "prepare": "Turn text into token shards.",
    "convert": "Hugging Face weights to ours and back, compared.",
    "export": "A model as files of Hugging Face, ONNX, torch.export or Triton, compared.",
    "bench": "Speeds on this machine: strategies, other tools, scaling, ceilings.",
    "report": "Write report.html of a run again.",
    "rebalance": "Even out the pipeline stages of a run by measured times.",
    "devices": "What this machine has.",
    "doctor": "Check this machine and say what to mend.",
}


def _usage() -> str:
    width = max(map(len, COMMANDS))
    lines = ["Usage: meshwright COMMAND [ARGS...]", "", "Commands:"]
    lines += [f"  {name:<{width}}  {text}" for name, text in COMMANDS.items()]
    lines += ["", "Example: meshwright train examples/quickstart.yaml", "Each command has --help with an example."]
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Run one command. Returns the exit code: 0 success, 2 the user's mistake, 1 a failure of ours, 130 Ctrl-C."""
    if argv is None:
        _speak_all_languages()
    args = list(sys.argv[1:] if argv is None else argv)
    if not args or args[0] in ("-h", "--help", "help"):
        print(_usage())
        return 0 if args else 2
    if args[0] in ("-V", "--version"):
        from meshwright import __version__

        print(f"meshwright {__version__}")
        return 0
    if args[0] not in COMMANDS:
        import difflib

        near = difflib.get_close_matches(args[0], COMMANDS, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        print(f"meshwright: there is no command {args[0]!r}.{hint}\n\n{_usage()}", file=sys.stderr)
        return 2
    return _run(args[0], args[1:])


def _speak_all_languages() -> None:
    """A locale that knows only ASCII, or a terminal that lacks a character, must not change or end a run.

    Names of files and text on the command line are UTF-8 where the locale says nothing, as in Python's own UTF-8 mode, which
    can only be entered by a new start; the processes of the run inherit it.
    """
    if sys.getfilesystemencoding() == "ascii":
        os.environ["PYTHONUTF8"] = "1"
        os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.encoding.lower() not in ("utf-8", "utf8"):
            stream.reconfigure(errors="backslashreplace")
            os.environ["PYTHONIOENCODING"] = f"{stream.encoding}:backslashreplace"


def _run(name: str, args: list[str]) -> int:
    import typer

    from meshwright.disk import is_full, unwritable
    from meshwright.errors import MeshwrightError

    # newer typer carries a click of its own, so the class is found by way of one that typer shows
    usage_error: Any = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")
    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    try:
        importlib.import_module(f"meshwright.cli.{name}").register(app)
        result = typer.main.get_command(app)(args=args, prog_name=f"meshwright {name}", standalone_mode=False)
        return int(result or 0)
    except typer.Exit as error:
        return error.exit_code
    except usage_error as error:
        error.show()
        return 2
    except MeshwrightError as error:
        print(f"meshwright {name}: {error}", file=sys.stderr)
        return error.exit_code
    except (KeyboardInterrupt, typer.Abort):
        print(f"meshwright {name}: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the reader went away; Python would complain at exit
        return 0
    except OSError as error:
        if not is_full(error):  # which may be met wherever in a command
            raise
        print(f"meshwright {name}: {unwritable(error.filename or '', error)}", file=sys.stderr)
        return 2
