"""The rules of the house that a reader cannot see in one file: which folder may import which, what must stay light, and
which names of torch may be used.
"""

from __future__ import annotations

import ast
import functools
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshwright.cli import COMMANDS

pytestmark = pytest.mark.alone

PACKAGE = Path(__file__).parents[2] / "meshwright"

ORDER = (
    "errors", "disk", "compat", "config", "spec", "plan", "interop", "kernels", "distributed", "data", "models", "parallel",
    "observe", "checkpoint", "train", "verify", "emulate", "calibrate", "export", "serve", "bench", "runtime", "cli",
)  # fmt: skip
"""A folder may import what stands before it. CONTRIBUTING.md explains each."""

ALLOWED = {("bench", "runtime"), ("serve", "runtime")}
"""The benchmark measures whole runs, and the engine loads what a run left, which `runtime` makes; `runtime` imports neither."""

TORCH_FREE = ("errors", "disk", "config", "spec", "plan", "interop")


def modules() -> list[Path]:
    return sorted(path for path in PACKAGE.rglob("*.py"))


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def layer_of(path: Path) -> str | None:
    """Folder or top-level module; None for the package itself, which holds nothing but the version."""
    first = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    return None if first in ("__init__", "__main__") else first


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every import, those inside functions and under TYPE_CHECKING included."""
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports are absolute here"
            # `from meshwright import data` imports a layer as well
            names = [f"meshwright.{alias.name}" for alias in node.names] if node.module == "meshwright" else [node.module]
            yield from ((node.lineno, str(name)) for name in names)


def upward(path: Path, layer: str) -> Iterator[str]:
    for line, name in imports(path):
        target = name.split(".")[1] if name.startswith("meshwright.") else None
        if target not in ORDER or target == layer or (layer, target) in ALLOWED:
            continue
        if ORDER.index(target) > ORDER.index(layer):
            yield (
                f"{path.relative_to(PACKAGE.parent)}:{line}: {layer} imports {target}, which comes after it. "
                f"Move the code, or let runtime pass the function in"
            )


def test_every_folder_has_a_place_in_the_order():
    unknown = {layer for path in modules() if (layer := layer_of(path)) is not None} - set(ORDER)
    assert not unknown, f"add {sorted(unknown)} to ORDER here and to CONTRIBUTING.md"


def test_imports_point_upward_only():
    """Mutation tried: `from meshwright.train import state` in data/order.py is named with its line."""
    found = [line for path in modules() if (layer := layer_of(path)) is not None for line in upward(path, layer)]
    assert not found, "\n" + "\n".join(found)


def test_an_exception_is_used():
    used = {
        (layer, name.split(".")[1])
        for path in modules()
        if (layer := layer_of(path)) is not None
        for _, name in imports(path)
        if name.startswith("meshwright.") and name.count(".")
    }
    assert used >= ALLOWED, f"no longer needed: {ALLOWED - used}"


def test_folders_of_plain_data_do_not_import_torch():
    found = [
        f"{path.relative_to(PACKAGE.parent)}:{line}: {layer} is kept free of torch, but imports {name}"
        for path in modules()
        if (layer := layer_of(path)) in TORCH_FREE
        for line, name in imports(path)
        if name.split(".")[0] in ("torch", "triton", "transformers")
    ]
    assert not found, "\n" + "\n".join(found)


PRIVATE = re.compile(r"\b(?:torch|dist|nn|functional)(?:\.\w+)*\._(?!_)\w+")


def private_names(path: Path) -> Iterator[str]:
    """Names of torch that begin with an underscore: in imports, and as attributes of torch's own modules."""
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            parts = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            if any(part.startswith("_") for part in parts):
                yield f"{path.relative_to(PACKAGE.parent)}:{node.lineno}: {ast.unparse(node)}"
        elif isinstance(node, ast.Attribute) and PRIVATE.fullmatch(ast.unparse(node)):
            yield f"{path.relative_to(PACKAGE.parent)}:{node.lineno}: {ast.unparse(node)}"


def test_private_names_of_torch_are_in_compat_only():
    """Mutation tried: `torch._foreach_add_(...)` in parallel/norm.py is named with its line."""
    found = [name for path in modules() if path.name != "compat.py" for name in private_names(path)]
    assert not found, "private names of torch belong in meshwright/compat.py, each with a test:\n" + "\n".join(found)


NARROWING = re.compile(r"\.float\(\)|\.to\((?:dtype=)?torch\.float32\)|\.type\(torch\.float32\)|\.half\(\)|\.bfloat16\(\)")
MAY_NARROW = {
    "export/hf.py",  # compares with another library, which computes in fp32
    "kernels/fp8.py",  # numbers of 8 bits, and scales in fp32 whatever they are of
    "kernels/rowwise.py",  # the same
    "parallel/norm.py",  # a truth value as a number
    "kernels/triton_kernels.py",  # the same
}


def test_numbers_are_widened_to_at_least_fp32_and_never_narrowed():
    """fp64 must stay fp64: `torch.promote_types(x.dtype, torch.float32)` instead of `.float()`.

    Mutation tried: `logits.float()` in kernels/cross_entropy.py is named with its line.
    """
    found = [
        f"{path.relative_to(PACKAGE.parent)}:{number}: {line.strip()}"
        for path in modules()
        if path.relative_to(PACKAGE).as_posix() not in MAY_NARROW
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if NARROWING.search(line.split("#")[0])
    ]
    assert not found, "use torch.promote_types(x.dtype, torch.float32), which keeps fp64:\n" + "\n".join(found)


CHECK_LIGHT = """
import sys
from meshwright.cli import main
code = main({args!r})
heavy = sorted({{'torch', 'pydantic', 'numpy', 'transformers', 'pyarrow', 'plotly'}} & set(sys.modules))
print('heavy:', ' '.join(heavy))
sys.exit(code)
"""


@pytest.mark.parametrize("args", [["--help"], *([name, "--help"] for name in COMMANDS)], ids=" ".join)
def test_help_imports_nothing_heavy_and_is_quick(args: list[str]):
    """The fastest of a few tries against twice the aim of 0.3 s, so that a busy machine does not decide."""
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-c", CHECK_LIGHT.format(args=args)], capture_output=True, text=True, env=os.environ, timeout=60
        )
        seconds.append(time.perf_counter() - start)
        assert done.returncode == 0, done.stderr
        assert done.stdout.rstrip().endswith("heavy:"), f"meshwright {' '.join(args)} imports {done.stdout.splitlines()[-1]}"
        assert "Example" in done.stdout, "every help shows an example"
        if seconds[-1] <= 0.3:
            break
    assert min(seconds) <= 0.6, f"meshwright {' '.join(args)} took {min(seconds):.2f} s; it should take 0.3 s"


CHECK_START = """
import sys
import torch.distributed
before = 'torch._dynamo' in sys.modules
import meshwright.runtime.worker
from meshwright.config.schema import ModelConfig
from meshwright.models import build
build(ModelConfig(layers=1, width=8, heads=2, ffn=16, vocab=9, positions='learned'), 'lm')
print('loaded' if 'torch._dynamo' in sys.modules and not before else 'light')
"""


def test_a_start_does_not_load_the_compiler():
    """It takes more than a second of every rank. Red with an `nn.Embedding` that draws its values on meta, and with a
    decorator of `torch.compiler`."""
    done = subprocess.run([sys.executable, "-c", CHECK_START], capture_output=True, text=True, env=os.environ, timeout=120)
    assert done.stdout.split() == ["light"], done.stdout + done.stderr
