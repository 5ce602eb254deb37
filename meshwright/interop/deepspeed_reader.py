"""Values out of a DeepSpeed config: numbers, switches and sections, with everything that is wrong kept for one message."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from meshwright.errors import ConfigError, Finding
from meshwright.interop import deepspeed_keys as keys

__all__ = ["AUTO", "Reader"]

AUTO = "auto"


@dataclass
class Reader:
    """where: the file. arguments: what fills "auto" and what is absent.

    findings: what is refused. warnings: what has no effect though its writer may believe so. dead: keys that change nothing
    that is computed. unresolved: keys whose "auto" has no value.
    """

    where: str
    arguments: dict[str, Any]
    findings: list[Finding] = field(default_factory=list)
    warnings: list[Finding] = field(default_factory=list)
    dead: list[str] = field(default_factory=list)
    unresolved: list[str] = field(default_factory=list)

    # ---- values

    def refuse(self, key: str, what: str, fix: str = "") -> None:
        self.findings.append(Finding(f"{self.where}: {key}", what, fix))

    def warn(self, key: str, what: str, fix: str = "") -> None:
        self.warnings.append(Finding(f"{self.where}: {key}", what, fix))

    def raise_findings(self) -> None:
        for key in self.unresolved:
            self.refuse(key, '"auto" has no value here', "Write a number, or give the argument that it stands for")
        if self.unresolved:
            self.findings += [warning for warning in self.warnings if '"auto"' in warning.what]
        if self.findings:
            raise ConfigError(findings=self.findings)

    def section(self, data: Mapping[str, Any], key: str, within: str = "") -> Mapping[str, Any]:
        value = data.get(key)
        if value is None:
            return {}
        if not isinstance(value, Mapping):
            self.refuse(f"{within}{key}", f"is no object but {value!r}")
            return {}
        return value

    def _value(self, data: Mapping[str, Any], name: str, default: Any, key: str, argument: str, spare: bool = False) -> Any:
        """What is given, with "auto" and what is absent from the arguments. spare: the default stands for "auto"."""
        value = data.get(name)
        if value is not None and value != AUTO:
            return value
        if argument in self.arguments:
            return self.arguments[argument]
        if value == AUTO and not spare:
            self.unresolved.append(key)
        elif value == AUTO:
            self.warn(key, f'"auto" has no value here; the default {default!r} is taken')
        return default

    def number(
        self,
        data: Mapping[str, Any],
        name: str,
        default: Any,
        *,
        key: str = "",
        argument: str = "",
        low: float | None = None,
        high: float | None = None,
        spare: bool = False,
    ) -> Any:
        key = key or name
        value = self._value(data, name, default, key, argument, spare)
        if value is None or value is default:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            self.refuse(key, f"{value!r} is no number")
            return default
        if not math.isfinite(value):
            self.refuse(key, f"{value!r} is no finite number")
            return default
        if (low is not None and value < low) or (high is not None and value > high):
            self.refuse(key, f"{value!r} is {f'below {low:g}' if low is not None and value < low else f'above {high:g}'}")
            return default
        return value

    def whole(self, data: Mapping[str, Any], name: str, default: Any, **options: Any) -> Any:
        """A whole number; 2e8 is one."""
        value = self.number(data, name, default, **options)
        if value is not None and value != int(value):
            self.refuse(options.get("key") or name, f"{value!r} is no whole number")
            return default
        return None if value is None else int(value)

    def flag(self, data: Mapping[str, Any], name: str, default: Any, key: str = "") -> Any:
        value = data.get(name, default)
        if value == AUTO:
            value = self.arguments.get(key or name, default)
        if value is default or isinstance(value, bool):
            return value
        if value in (0, 1):
            return bool(value)
        self.refuse(key or name, f"{value!r} is neither true nor false")
        return default

    def unknown(self, data: Mapping[str, Any], known: Iterable[str], prefix: str, strict: bool = True) -> None:
        for name in map(str, data):
            if name in known:
                continue
            hint = keys.HINTS.get(name) if not prefix else None
            near = [hint] if hint else difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.6)
            fix = f"Did you mean {near[0]!r}?" if near else ""
            if strict:
                self.refuse(f"{prefix}{name}", "is no key of DeepSpeed", fix)
            else:
                effect = "; gradients are not clipped by it" if hint == "gradient_clipping" else ""
                self.warn(f"{prefix}{name}", f"is no key of DeepSpeed, which ignores it in silence{effect}", fix)
