"""The page at `/`: one file with its own style and script, which loads nothing from anywhere else."""

from __future__ import annotations

import base64
import functools
import hashlib
import re
from importlib import resources

__all__ = ["headers", "html"]


@functools.cache
def html() -> str:
    return resources.files("meshwright.serve").joinpath("page.html").read_text(encoding="utf-8")


@functools.cache
def headers() -> dict[str, str]:
    """A policy under which the browser runs this script and no other, and talks to this server only."""

    def digest(tag: str) -> str:
        inner = re.search(rf"<{tag}>(.*?)</{tag}>", html(), re.DOTALL)
        assert inner is not None
        return base64.b64encode(hashlib.sha256(inner[1].encode()).digest()).decode()

    policy = [
        "default-src 'none'",
        f"script-src 'sha256-{digest('script')}'",
        f"style-src 'sha256-{digest('style')}'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    ]
    return {"content-security-policy": "; ".join(policy), "x-content-type-options": "nosniff", "referrer-policy": "no-referrer"}
