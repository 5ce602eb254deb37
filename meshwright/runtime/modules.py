"""The user's own Python files, which may register models and objectives."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from meshwright.errors import ConfigError, Finding, MeshwrightError

__all__ = ["load_modules"]


def load_modules(paths: Sequence[str]) -> None:
    """Run each file once, under a name made from its path. Raises ConfigError with the line of the user's own mistake."""
    findings = []
    for path in paths:
        file = Path(path)
        if not file.is_file():
            findings.append(Finding("run.modules", f"there is no file {path}"))
            continue
        name = f"meshwright_user_{file.stem}_{hashlib.sha256(str(file.resolve()).encode()).hexdigest()[:8]}"
        if name in sys.modules:
            continue
        spec = importlib.util.spec_from_file_location(name, file)
        if spec is None or spec.loader is None:
            findings.append(Finding("run.modules", f"{path} is no Python file"))
            continue
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
        except MeshwrightError:
            raise
        except (Exception, SystemExit) as error:  # whatever the user's file does wrong is the user's to mend
            del sys.modules[name]
            findings.append(Finding(_place(path, error), _told(error)))
    if findings:
        raise ConfigError(findings=findings)


def _place(path: str, error: BaseException) -> str:
    """FILE:LINE of the mistake: where the text cannot be read as Python, else where it was raised."""
    if isinstance(error, SyntaxError) and error.lineno is not None:
        return f"{error.filename or path}:{error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    mine = [frame for frame in frames if Path(frame.filename).resolve() == Path(path).resolve()]
    return f"{path}:{(mine or frames)[-1].lineno}"


def _told(error: BaseException) -> str:
    if isinstance(error, SystemExit):
        return f"ends the program (exit code {error.code}); a module is loaded by every rank and must come to its end"
    return f"{type(error).__name__}: {error.msg if isinstance(error, SyntaxError) else error}"
