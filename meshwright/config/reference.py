"""The reference of all settings, made from the schema so that it cannot drift.

python -m meshwright.config.reference > docs/config.md
python -m meshwright.config.reference --json > docs/config.schema.json
"""

from __future__ import annotations

import argparse
import json
import types
import typing
from collections.abc import Iterator
from typing import Any, Literal

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from meshwright.config.load import json_schema
from meshwright.config.schema import Config

__all__ = ["markdown", "schema_text", "sections"]

HEAD = """# All settings

Made from `meshwright/config/schema.py` by `python -m meshwright.config.reference > docs/config.md`; do not edit.

A run is described by one YAML file. Any value can also be given on the command line as `--section.key=value`; a number in
the path is the place in a list: `--data.train.0.path=notes.txt`. A flag wins over the file, the file over `model.recipe`,
the recipe over the default. An unknown key is refused. `config.yaml` in the run folder has every value and where it came from.

`config.schema.json` beside this page is the same as a JSON schema. Editors that speak the YAML language server complete and
check a file that begins with `# yaml-language-server: $schema=` and the path of the schema. Meshwright's own check has the
last word: it also finds settings that contradict each other.
"""


def sections(model: type[BaseModel] = Config, key: str = "") -> Iterator[tuple[str, type[BaseModel]]]:
    """(dotted key, class) of every section, parents before children; '' is the top level, a list of sections ends in `.N`."""
    yield key, model
    for name, field in model.model_fields.items():
        inner = _section_of(field.annotation)
        if inner is not None:
            where = f"{key}.{name}" if key else name
            yield from sections(inner, f"{where}.N" if typing.get_origin(field.annotation) is list else where)


def markdown() -> str:
    """docs/config.md: one table a section with key, type, default and meaning."""
    parts = [HEAD]
    for key, model in sections():
        rows = [_row(name, field) for name, field in model.model_fields.items() if key or _section_of(field.annotation) is None]
        title = f"## `{key}`" if key else "## Top level"
        lines = [title, "", *_intro(model), "| key | type | default | meaning |", "|---|---|---|---|", *rows, ""]
        parts.append("\n".join(lines))
    return "\n".join(parts)


def schema_text() -> str:
    """docs/config.schema.json."""
    return json.dumps(json_schema(), indent=1, ensure_ascii=False) + "\n"


def _intro(model: type[BaseModel]) -> list[str]:
    text = " ".join((model.__doc__ or "").split())
    return [text, ""] if text else []


def _row(name: str, field: FieldInfo) -> str:
    inner = _section_of(field.annotation)
    meaning = field.description or ("see its own table" if inner is not None else "")
    cells = (f"`{name}`", _type(field.annotation, field.metadata), _default(field), meaning)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.default
    if isinstance(value, BaseModel):
        return ""
    if isinstance(value, list) and any(isinstance(entry, BaseModel) for entry in value):
        value = [entry.model_dump(exclude_defaults=True) for entry in value]
    return f"`{json.dumps(value, ensure_ascii=False)}`" if value is not None else "none"


def _section_of(annotation: Any) -> type[BaseModel] | None:
    """The section inside an annotation: itself, optional, or the entries of a list."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for inner in typing.get_args(annotation) if (found := _section_of(inner)) is not None), None)


_NAMES = {int: "whole number", float: "number", str: "text", bool: "true or false", Any: "anything"}


def _type(annotation: Any, metadata: typing.Iterable[Any] = ()) -> str:
    """An annotation in words, with its bounds."""
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return _type(args[0], [*metadata, *_flat(args[1:])])
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in args)
    if origin in (typing.Union, types.UnionType):
        return _type(next(arg for arg in args if arg is not type(None)), metadata)
    if origin is list:
        return f"list of {_plural(_type(args[0]))}"
    if origin is tuple:
        return f"list of {len(args)}: {_type(args[0])}"
    if origin is dict:
        return "mapping"
    if _section_of(annotation) is not None:
        return "section"
    return " ".join([_NAMES[annotation], *_bounds(metadata)])


def _plural(text: str) -> str:
    return {"section": "sections", "text": "texts"}.get(text, text)


def _flat(metadata: typing.Iterable[Any]) -> Iterator[Any]:
    for entry in metadata:
        yield from entry.metadata if isinstance(entry, FieldInfo) else [entry]


def _bounds(metadata: typing.Iterable[Any]) -> list[str]:
    signs = ((Ge, "ge", "≥"), (Gt, "gt", ">"), (Le, "le", "≤"), (Lt, "lt", "<"))
    found = [f"{sign} {getattr(entry, name):g}" for entry in metadata for kind, name, sign in signs if isinstance(entry, kind)]
    return [" and ".join(found)] if found else []


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m meshwright.config.reference", description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="the JSON schema instead of the page")
    print(schema_text() if parser.parse_args().json else markdown(), end="")


if __name__ == "__main__":
    main()
