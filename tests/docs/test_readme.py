"""Both README files: in step with each other, true to the code, and their commands work."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import typer

from meshwright.cli import COMMANDS, main
from tests.docs.markdown import ROOT, arguments, blocks, commands, without_comment

ENGLISH, CHINESE = ROOT / "README.md", ROOT / "README.zh.md"
PAGES = [ENGLISH, CHINESE, ROOT / "CONTRIBUTING.md"]
RESULT = ROOT / "docs" / "quickstart-result.json"
MARK = "<!-- quickstart-result"


def headings(path: Path) -> list[int]:
    """Levels of the headings, in order."""
    plain = re.sub(r"^```.*?^```$", "", path.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    return [len(match[1]) for match in re.finditer(r"^(#+) ", plain, re.MULTILINE)]


def code(path: Path) -> list[tuple[str, list[str]]]:
    return [(block.language, [without_comment(line) for line in block.text.splitlines()]) for block in blocks(path)]


def section(path: Path, number: int) -> str:
    """Text of the second-level section with this number, from 0; the two languages have them in the same order."""
    return re.split(r"^## ", path.read_text(encoding="utf-8"), flags=re.MULTILINE)[number + 1]


def number_of(title: str) -> int:
    titles = re.findall(r"^## (.*)", ENGLISH.read_text(encoding="utf-8"), re.MULTILINE)
    return titles.index(title)


def links(path: Path) -> list[str]:
    return sorted(set(re.findall(r"\]\(([^)]+)\)", path.read_text(encoding="utf-8"))) - {"README.md", "README.zh.md"})


def in_first_column(text: str) -> list[str]:
    return re.findall(r"^\| `([^`]+)` \|", text, re.MULTILINE)


def test_both_languages_have_the_same_headings_links_and_code():
    assert headings(ENGLISH) == headings(CHINESE)
    assert code(ENGLISH) == code(CHINESE)
    assert links(ENGLISH) == links(CHINESE)


@pytest.mark.parametrize("page", [ENGLISH, CHINESE], ids=["en", "zh"])
def test_tables_name_every_recipe_command_and_file(page: Path):
    from meshwright.config.recipes import recipes
    from meshwright.models.hf_families import FAMILIES
    from meshwright.runtime.folder import RunFolder

    models = section(page, number_of("Models"))
    rows = re.findall(r"^\| [^|]+ \| (`.*) \|$", models, re.MULTILINE)
    assert sorted(re.findall(r"`([^`]+)`", " ".join(rows))) == recipes()
    assert in_first_column(section(page, number_of("Commands"))) == [f"meshwright {name}" for name in COMMANDS]
    files = in_first_column(section(page, number_of("How to read the report")))
    folder = RunFolder("run")
    paths = [folder.config, folder.plan, folder.metrics, None, folder.logs, folder.checkpoints, folder.data]
    assert [name.split("/")[0] for name in files] == [path.name if path else "report.html" for path in paths]
    exchange = re.sub(r"[ -]", "", section(page, number_of("To and from Hugging Face")).lower())
    assert not [family for family in FAMILIES if family.replace("_", "") not in exchange]


@pytest.mark.parametrize("page", [ENGLISH, CHINESE], ids=["en", "zh"])
def test_the_numbers_of_the_quickstart_are_those_of_its_result(page: Path):
    """After a new quickstart: copy summary.json of its run folder to docs/quickstart-result.json, and the lines below here."""
    from meshwright.observe.summary import Summary, rows_of

    rows = rows_of(Summary(**json.loads(RESULT.read_text(encoding="utf-8"))))
    width = max(len(label) for label, _ in rows)
    expected = "\n".join(f"{label:<{width}}  {text}" for label, text in rows)
    text = page.read_text(encoding="utf-8")
    assert text.count(MARK) == 1
    shown = re.search(r"```text\n(.*?)\n?```", text[text.index(MARK) :], re.DOTALL)
    assert shown is not None and shown[1] == expected, f"the block should be:\n{expected}"


@pytest.mark.parametrize("page", [ENGLISH, CHINESE], ids=["en", "zh"])
def test_the_bytes_of_a_parameter_are_those_of_the_memory_model(page: Path):
    """Mutation tried: 20 bytes in bf16, as if its gradients were kept in bf16 beside those in fp32."""
    from meshwright.plan.memory import state_bytes
    from meshwright.spec.layout import Layout

    said = re.findall(r"(\d+) (?:bytes|字节|in fp32)", section(page, number_of("Models")))
    assert [int(number) for number in said] == [state_bytes(1, precision, Layout()).total for precision in ("bf16", "fp32")]


def every_command() -> list[Any]:
    found = dict.fromkeys((page.name, command) for page in PAGES for command in commands(page))
    return [pytest.param(command, id=f"{page}: {command}") for page, command in found]


@pytest.mark.parametrize("command", every_command())
def test_every_command_is_one_that_exists(command: str, tmp_path: Path):
    """Its words are parsed by the program that will get them; nothing is run."""
    words = command.split()
    if words[0] == "make":
        makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
        assert all(re.search(rf"^{re.escape(target)}:", makefile, re.MULTILINE) for target in words[1:]), command
    elif words[0] == "torchrun":
        from torch.distributed.run import get_args_parser

        given = get_args_parser().parse_args(words[1:])
        assert given.module and given.training_script == "meshwright"
    elif words[:3] == ["python", "-m", "meshwright.config.reference"] or words[0] in ("source", "pip"):
        return  # tests/docs/test_docs.py runs the first; the others are the shell's and pip's
    args = arguments(command)
    assert (args is not None) == ("meshwright" in words), command
    if args is not None:
        check_arguments(args)


def check_arguments(args: list[str]) -> None:
    """Options by the command's own parser; settings by the schema."""
    import importlib

    from meshwright.cli.train import joined_overrides
    from meshwright.config.load import resolve
    from meshwright.config.yaml_source import YamlSource, read_yaml

    app = typer.Typer(add_completion=False)
    importlib.import_module(f"meshwright.cli.{args[0]}").register(app)
    context = typer.main.get_command(app).make_context(args[0], list(args[1:]))
    if args[0] not in ("train", "verify"):
        assert not context.args
        return
    file = ROOT / (context.params["config"] or "")
    source = read_yaml(file) if file.suffix == ".yaml" and file.is_file() else YamlSource({})
    overrides = [flag for flag in joined_overrides(context.args) if not flag.startswith("--data.train.0.")]
    resolve(source, str(file), overrides)


TINY = [
    "--train.schedule.warmup=1", "--train.batch=2", "--data.tokenizer.vocab=300", "--data.seq_len=16", "--data.workers=1",
    "--log.sample_tokens=2", "--evaluate.rows=2", "--run.device=cpu",
]  # fmt: skip


@pytest.fixture
def sandbox(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_rank: None, registries: None) -> Path:
    """A folder with the examples and what the README says to write."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    (tmp_path / "my-text").mkdir()
    rows = [json.dumps({"text": f"{i} cups of tea and {i + 1} cups of coffee. " * 3}) + "\n" for i in range(40)]
    (tmp_path / "my-text" / "cups.jsonl").write_text("".join(rows))
    (tmp_path / "my.yaml").write_text(blocks(ENGLISH, "yaml")[0].text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def story() -> list[list[str]]:
    """The README's commands that need nothing but this machine, in order."""
    lines = [args for command in commands(ENGLISH) if (args := arguments(command))]
    away = ("~/models", "models/llama")  # weights of others
    launching = ("doctor", "verify", "serve")
    return [args for args in lines if args[0] not in launching and not any(word.startswith(away) for word in args)]


def shortened(args: list[str], number: int) -> list[str]:
    """The same command on fewer steps and a tiny model; a second run of one config gets a folder of its own."""
    if args[0] == "convert":
        return [*args, "--compare", "weights"]
    if args[0] != "train":
        return args
    for option in (
        "--max-restarts",
        "--nproc",
        "--devices",
        "--nnodes",
        "--rdzv",
        "--plan",
    ):  # for the launcher, and this is a rank
        if option in args:
            at = args.index(option)
            args = [*args[:at], *args[at + 2 :]]
    resumed = "--resume" in args
    more = [*TINY, f"--train.steps={2 + number if resumed else 2}"]
    if "my.yaml" in args:
        more.append(f"--run.dir=runs/mine-{number}")
    if "examples/custom_model.yaml" in args:
        more += ["--data.train.0.path=my-text", "--data.valid_fraction=0.1"]
    return [*args, *more]


def test_the_commands_work_one_after_another(
    sandbox: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    names = set()
    for number, args in enumerate(story()):
        names.add(args[0])
        given = shortened(args, number)
        with monkeypatch.context() as patch:
            if "--dry-run" in given:
                patch.delenv("TORCHELASTIC_RUN_ID")  # it is the launcher's, not a rank's
            code = main(given)
        out = capsys.readouterr()
        assert code == 0, f"meshwright {' '.join(given)}\n{out.out}\n{out.err}"
        if args[0] == "train" and "--dry-run" not in args:
            assert "steps done" in out.out and "report.html" in out.out
    assert names == {"train", "evaluate", "generate", "prepare", "convert"}
    assert main(["report", "runs/own-text"]) == 0
    assert json.loads((sandbox / "runs/own-text/metrics.jsonl").read_text().splitlines()[-1])["step"] > 2
    assert (sandbox / "exported" / "model.safetensors").is_file()
