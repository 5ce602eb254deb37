"""docs/serving.md: its curl lines are sent, its flags are parsed, and its tables name what there is."""

from __future__ import annotations

import asyncio
import json
import re
import shlex
from typing import Any

import pytest

from meshwright.serve import gate, protocol, stream
from meshwright.serve.gate import Keys
from meshwright.serve.http import Limits
from meshwright.serve.runner import CPU_CACHE_BYTES
from meshwright.serve.server import HEADER_S, ServerOptions
from meshwright.serve.step_sizes import step_sizes
from tests.docs.markdown import ROOT, blocks, commands
from tests.unit.serve_fakes import FakeEngine, chunks, served
from tests.unit.test_serve_encoder import engine as encoder

PAGE = ROOT / "docs" / "serving.md"
TEXT = PAGE.read_text(encoding="utf-8")


def curls() -> list[str]:
    return [command for command in commands(PAGE) if command.startswith("curl ")]


def test_commands_are_parsed_by_their_own_parsers():
    from tests.docs.test_readme import check_arguments

    given = [command for command in commands(PAGE) if not command.startswith("curl ")]
    for command in given:
        words = shlex.split(command)
        if words[0] == "meshwright":
            check_arguments(words[1:])
        else:
            assert words[0] in ("pip", "openssl"), command
    assert len(given) + len(curls()) == len(commands(PAGE)) and len(curls()) == 10


@pytest.mark.parametrize("command", curls())
def test_every_curl_line_is_answered(command: str):
    words = [word.replace("$KEY", "s3cret") for word in shlex.split(command)]
    url = next(word for word in words if word.startswith("http"))
    headers = dict(words[at + 1].split(": ", 1) for at, word in enumerate(words) if word == "-H")
    data = words[words.index("-d") + 1] if "-d" in words else None
    task = {"/v1/classify": "classify", "/v1/fill-mask": "mlm", "/v1/embeddings": "mlm"}.get(
        url.removeprefix("http://127.0.0.1:8000")
    )
    keyed = "Authorization" in headers or task is None

    async def story() -> None:
        made: Any = encoder(task) if task else FakeEngine(max_len=200)
        async with served(made, keys=Keys(["s3cret"]) if keyed else None) as here:
            answer = await here.http.request("GET" if data is None else "POST", url, headers=headers, content=data)
            assert answer.status_code == 200, answer.text
            if data is not None and json.loads(data).get("stream"):
                assert "-sN" in words and chunks(answer.text)[-1] == "[DONE]"

    asyncio.run(asyncio.wait_for(story(), 20))


def table(heading: str) -> list[list[str]]:
    section = TEXT.split(f"## {heading}\n")[1].split("\n## ")[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line.startswith("| ")][1:]


def test_the_tables_name_what_there_is():
    async def story() -> None:
        routes = {"/openapi.json"}
        for made in (FakeEngine(), encoder("mlm"), encoder("classify")):  # each document has what its model does
            async with served(made) as here:
                routes |= {path for path in here.app.openapi()["paths"] if "{" not in path}
        async with served() as here:
            assert {row[0].strip("`") for row in table("Routes")} == routes
            names = re.findall(r"^# TYPE (\w+) ", (await here.http.get("/metrics")).text, re.MULTILINE)
            assert {row[0].strip("`") for row in table("Metrics")} == {name for name in names if not name.endswith("_created")}
            error = json.loads(blocks(PAGE, "json")[0].text)
            assert (await here.post("/v1/completions", prompt="a", max_token=3)).json() == error

    asyncio.run(asyncio.wait_for(story(), 20))


def test_the_limits_are_those_of_the_code():
    values = {row[0]: row[1] for row in table("Limits")}
    limits, options = Limits(), ServerOptions()
    assert values["body"] == f"`--max-body`, {limits.max_body >> 20} MiB; all of it within {limits.body_s:g} s"
    assert values["head of a request"] == f"{HEADER_S:g} s"
    assert values["prompts of a request, inputs"] == str(protocol.MAX_PROMPTS)
    assert values["`n`, `best_of`"] == str(protocol.MAX_N) and values["answers of a request (prompts x n)"] == str(
        limits.max_answers
    )
    assert values["`logprobs`, `top_logprobs`"] == str(protocol.MAX_LOGPROBS)
    assert values["`stop`, `stop_token_ids`"].startswith(f"{protocol.MAX_STOPS},")
    assert values["requests that wait for their first token"] == f"`--max-queue`, {options.max_queue}"
    assert values["tokens of their prompts"] == f"`--max-queue-tokens`, {options.max_queue_tokens:,}"
    assert values["a client that takes nothing of its stream"] == f"{stream.SEND_S:g} s"
    assert f"after {stream.PING_S:g} silent seconds" in TEXT and gate.VARIABLE in TEXT


def test_the_sizes_of_a_step_are_those_of_the_code():
    """Mutation tried: 8,192 tokens offline."""
    rows = {row[0].strip("`"): row[2:] for row in table("How much at a time")}
    sizes = [step_sizes(kind, offline) for kind, offline in (("cuda", False), ("cuda", True), ("cpu", False))]
    assert rows["--max-running"] == [f"{size.running:,}" for size in sizes]
    assert rows["--token-budget"] == [f"{size.tokens:,}" for size in sizes] and step_sizes("cpu", True) == sizes[-1]
    assert rows["--blocks"][2].endswith(f"at most {CPU_CACHE_BYTES >> 30} GiB")
    options = ServerOptions()
    assert f"`--drain` seconds ({options.drain_s:g})" in TEXT and f"`--stall` seconds ({options.stall_s:g})" in TEXT


def test_every_setting_is_named():
    section = TEXT.split("## Settings of a request\n")[1].split("\n## ")[0]
    named = set(re.findall(r"`(\w+)`", section))
    for body in (protocol.CompletionRequest, protocol.ChatRequest):
        missing = set(body.model_fields) - set(protocol.UNSUPPORTED) - named
        assert not missing
