"""The pages of docs/ and CONTRIBUTING.md: made from the code where they can be, and true where they are not."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.markdown import ROOT, blocks
from tests.unit.test_layers import ORDER


def tracked() -> list[Path]:
    """Text files that git knows or would add."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        names = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, timeout=60).stdout.decode().split("\0")
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("this is no git checkout")
    paths = [ROOT / name for name in names if name]
    return [path for path in paths if path.is_file() and b"\0" not in path.read_bytes()[:4096]]


@pytest.mark.parametrize(("name", "flags"), [("config.md", []), ("config.schema.json", ["--json"])])
def test_the_reference_of_settings_is_up_to_date(name: str, flags: list[str]):
    command = [sys.executable, "-m", "meshwright.config.reference", *flags]
    made = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60, cwd=ROOT, encoding="utf-8").stdout
    again = f"python -m meshwright.config.reference {' '.join(flags)} > docs/{name}"
    assert (ROOT / "docs" / name).read_text(encoding="utf-8") == made, f"run: {again}"


def test_the_reference_has_every_setting_once():
    from meshwright.config.load import flatten
    from meshwright.config.reference import sections
    from meshwright.config.schema import Config

    keys = [f"{key}.{name}" if key else name for key, model in sections() for name in model.model_fields]
    assert len(keys) == len(set(keys))
    shown = {key.replace(".N", ".0") for key in keys}
    assert {key for key, _ in flatten(Config().model_dump())} <= shown


@pytest.mark.usefixtures("registries")
def test_the_python_blocks_of_the_architecture_run():
    page = ROOT / "docs" / "architecture.md"
    names: dict[str, object] = {}
    for block in blocks(page, "python"):
        source = "\n" * block.line + block.text  # so that a traceback has the line of the page
        exec(compile(source, str(page), "exec"), names)
    assert "Unigram" in names and "InBits" in names


def test_contributing_lists_the_folders_in_the_order_that_is_enforced():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)/?` \| (.*) \|$", text, re.MULTILINE)
    assert tuple(name for name, _ in rows) == ORDER
    package = ROOT / "meshwright"
    for name, what in rows:
        here = (package / name).is_dir() or (package / f"{name}.py").is_file()
        assert here != what.endswith("(planned)"), f"{name}: the table and the folder disagree"


def test_contributing_lists_the_folders_of_tests():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"^\| `tests/(\w+)/` \|", text, re.MULTILINE))
    assert listed == {path.parent.name for path in (ROOT / "tests").glob("*/__init__.py")}


def test_the_block_on_numerics_tests_runs():
    (example, _) = blocks(ROOT / "CONTRIBUTING.md", "python")
    names: dict[str, object] = {}
    exec(example.text, names)
    names["test_the_loss_weighs_targets_and_not_micro_batches"]()  # type: ignore[operator]


def test_links_and_names_of_files_lead_somewhere():
    broken = []
    for page in [path for path in tracked() if path.suffix == ".md"]:
        text = page.read_text(encoding="utf-8")
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text):
            if "://" not in target and not (page.parent / target).exists():
                broken.append(f"{page.relative_to(ROOT)}: {target}")
        for target in re.findall(r"`((?:meshwright|tests|docs|examples)/[\w./-]+\.\w+)`", text):
            if not (ROOT / target).exists():
                broken.append(f"{page.relative_to(ROOT)}: {target}")
    assert not broken, "\n" + "\n".join(broken)


OWN_PATH = re.compile(r"(?:^|[^\w.~$}>)*-])/(?:work|root|farm|home/\w+|Users/\w+)(?:/|\b)")
ADDRESS = re.compile(r"(?<![\w.=<>-])(?:\d{1,3}\.){3}\d{1,3}(?![\w.-])")
FREE_ADDRESS = re.compile(r"127\.|0\.0\.0\.0|255\.|192\.0\.2\.|198\.51\.100\.|203\.0\.113\.|198\.1[89]\.")
"""Loopback, any, broadcast, and those that RFC 5737 and RFC 2544 set aside for documentation and for tests."""
OWN_NETWORK = {"10.231.7.1", "10.0.0.1"}
"""Addresses that a test gives to a network which it makes itself, or which it only reads."""
INDEX = re.compile(r"--(?:extra-)?index-url|pythonhosted|pypi\.org/simple|/simple/|download\.pytorch|\bmirrors?\.\w+\.\w+")
DESK = re.compile(r"\bissues? #?\d+\b|\bcases? [A-I]\d+\b|\bbuilder [A-Z]\b")


def test_no_file_speaks_of_somebodys_machine_or_desk():
    """Mutation tried: a line with a home folder, one with 10.1.2.3, one with an index, one with a numbered issue."""
    found = []
    for path in tracked():
        if path == Path(__file__).resolve():
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
            addresses = [match[0] for match in ADDRESS.finditer(line) if not FREE_ADDRESS.match(match[0])]
            addresses = [address for address in addresses if address not in OWN_NETWORK]
            others = [match[0].strip() for pattern in (OWN_PATH, INDEX, DESK) if (match := pattern.search(line))]
            found += [f"{path.relative_to(ROOT)}:{number}: {what}" for what in addresses + others]
    assert not found, "\n" + "\n".join(found[:40])


def test_the_patterns_find_what_they_are_for():
    assert OWN_PATH.search("cd /home/ann/x") and OWN_PATH.search('"/root/x"') and not OWN_PATH.search("tests/work/x")
    found = ADDRESS.search("ssh 10.1.2.3 now")
    assert found is not None and not FREE_ADDRESS.match(found[0]) and FREE_ADDRESS.match("127.0.0.1")
    assert INDEX.search("pip install --index-url x") and DESK.search("see issue 12") and not DESK.search("in case A is")
