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
        except Exception as error:  # whatever the user's file does wrong is the user's to mend
            del sys.modules[name]
            line = traceback.extract_tb(error.__traceback__)[-1].lineno
            findings.append(Finding(f"{path}:{line}", f"{type(error).__name__}: {error}"))
    if findings:
        raise ConfigError(findings=findings)
