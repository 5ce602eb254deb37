"""docs/data.md: its settings are legal, its commands are parsed, its rows are rows."""

from __future__ import annotations

import json
import shlex

import pytest
import yaml

from meshwright.config.check import check
from meshwright.config.recipes import recipe
from meshwright.config.schema import Config
from meshwright.data.parse import Document, Keys, Piece, parse
from tests.docs.markdown import ROOT, Block, blocks, commands

PAGE = ROOT / "docs" / "data.md"


def test_commands_are_parsed_by_their_own_parsers():
    from tests.docs.test_readme import check_arguments

    found = commands(PAGE)
    assert len(found) == 3
    for command in found:
        words = shlex.split(command)
        assert words[0] == "meshwright", command
        check_arguments(words[1:])


@pytest.mark.parametrize("block", blocks(PAGE, "yaml"), ids=lambda block: f"line {block.line}")
def test_settings_are_legal(block: Block):
    given = yaml.safe_load(block.text)
    if "model" in given:
        given["model"] = {**recipe(given["model"]["recipe"]), **given["model"]}
    given.setdefault("model", {"arch": "decoder"})
    assert not check(Config.model_validate(given))


def test_pairs_are_documents_with_a_prompt():
    # Mutation tried: with "prompt" and "response" as other names in the page the rows are refused.
    text = blocks(PAGE, "json")[0].text
    piece = Piece(kind="lines", file="pairs.jsonl", data=text.encode(), codec="utf-8")
    found = list(parse(piece, Keys()))
    rows = [json.loads(line) for line in text.splitlines()]
    assert [(each.prompt, each.text) for each in found if isinstance(each, Document)] == [
        (row["prompt"], row["response"]) for row in rows
    ]
