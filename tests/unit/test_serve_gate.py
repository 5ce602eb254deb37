"""Before the routes: keys, sizes, times. Beside them: the page and the OpenAPI document."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from meshwright.errors import UserError
from meshwright.serve.gate import Keys, read_keys
from meshwright.serve.http import Limits, create_app
from meshwright.serve.server import Impatient
from meshwright.serve.service import Service
from tests.unit.serve_fakes import FakeEngine, served


def run(coroutine: Any) -> None:
    asyncio.run(asyncio.wait_for(coroutine, 20))


COMPLETE, CHAT = "/v1/completions", "/v1/chat/completions"


def test_a_key_is_asked_for_everywhere_but_of_health_and_ready():
    async def story() -> None:
        async with served(keys=Keys(["s3cret", "other"])) as here:
            paths = {path for path in here.app.openapi()["paths"] if "{" not in path}
            assert len(paths) == 7
            paths |= {"/v1/embeddings", "/v1/classify", "/v1/fill-mask"}  # which this model does not do
            for path in [*paths, "/openapi.json", "/v1/models/fake", "/nothing"]:
                method = "POST" if path in (COMPLETE, CHAT, "/v1/embeddings", "/v1/classify", "/v1/fill-mask") else "GET"
                status = (await here.http.request(method, path)).status_code
                assert (status == 401) is (path not in ("/health", "/ready")), path
            basic = base64.b64encode(b"any:s3cret").decode()
            for value, status in (
                ("Bearer s3cret", 200), ("bearer other", 200), (f"Basic {basic}", 200), ("Bearer s3cre", 401), ("Bearer ", 401),
                ("s3cret", 401), ("Basic !!", 401), ("Bearer s3cret x", 401),
            ):  # fmt: skip
                answer = await here.http.get("/v1/models", headers={"authorization": value})
                assert answer.status_code == status, value
                assert "s3cret" not in answer.text
            answer = await here.http.get("/")
            assert answer.headers["www-authenticate"].startswith("Basic")  # so that a browser asks for it
            assert (await here.http.get("/v1/models")).headers["www-authenticate"].startswith("Bearer")
            assert here.app.openapi()["components"]["securitySchemes"] == {"key": {"type": "http", "scheme": "bearer"}}

    run(story())


def test_bodies_are_bounded_in_size_time_and_kind():
    async def story() -> None:
        async with served(limits=Limits(max_body=2000, body_s=0.05)) as here:

            async def pieces(count: int, pause: float = 0.0):
                for _ in range(count):
                    await asyncio.sleep(pause)
                    yield b"x" * 100

            json_type = {"content-type": "application/json"}
            large = await here.http.post(COMPLETE, content=b"x" * 2001, headers=json_type)
            assert large.status_code == 413 and large.json()["error"]["code"] == "body_too_large"
            assert (await here.http.post(COMPLETE, content=pieces(50), headers=json_type)).status_code == 413
            slow = await here.http.post(COMPLETE, content=pieces(10, 0.02), headers=json_type)
            assert slow.status_code == 408
            for kind in ("text/plain", "multipart/form-data; boundary=x", ""):
                answer = await here.http.post(COMPLETE, content=b'{"prompt": "a"}', headers={"content-type": kind})
                assert answer.status_code == 415
            kind = {"content-type": "application/json; charset=utf-8"}
            assert (await here.http.post(COMPLETE, content=b'{"prompt": "a"}', headers=kind)).status_code == 200

    run(story())


@asynccontextmanager
async def listening(engine: FakeEngine, **options: Any) -> AsyncIterator[int]:
    """The port of a server with sockets. options: of create_app."""
    service = Service(engine)
    app = create_app(service, **options)
    config = uvicorn.Config(app, http=Impatient, ws="none", lifespan="off", log_level="error", port=0, timeout_keep_alive=1)
    config.load()
    state = uvicorn.Server(config).server_state
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Impatient(config=config, server_state=state, app_state={}), "127.0.0.1", 0)
    service.start()
    async with server:
        yield server.sockets[0].getsockname()[1]
    await service.close()


def test_a_client_that_sends_on_after_it_was_refused_sees_the_answer():
    """The rest of its body comes 2.2 s later, within the time that a body may take. Mutations tried: 2 s for what is too large,
    and no time of its own for what has no key, which ends with the second in which a connection without a request is kept.
    """

    async def one(port: int, size: int, key: bytes) -> tuple[bytes, bytes]:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer %b\r\ncontent-length: %d\r\n\r\n"
        writer.write(head % (key, size) + b"x" * (size // 2))
        answer = await reader.readuntil(b"}}")
        with pytest.raises(TimeoutError):  # not closed
            await asyncio.wait_for(reader.read(1), 2.2)
        writer.write(b"x" * (size - size // 2) + b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        after = await reader.read(12)
        writer.close()
        return answer, after

    async def story() -> None:
        async with listening(FakeEngine(), limits=Limits(max_body=2000, body_s=8), keys=Keys(["right"])) as port:
            large, keyless = await asyncio.gather(one(port, 3000, b"right"), one(port, 1000, b"wrong"))
        assert b" 413 " in large[0] and large[1] == b""  # this connection was to be closed, and in good order
        assert b" 401 " in keyless[0] and keyless[1] == b"HTTP/1.1 200"

    run(story())


@pytest.mark.parametrize(("key", "status"), [(b"wrong", b" 401 "), (b"right", b" 503 ")])
def test_a_client_that_still_sends_when_the_server_ends_leaves_no_traceback(
    capsys: pytest.CaptureFixture[str], key: bytes, status: bytes
):
    """uvicorn cancels what is left after its deadline. Mutations tried, each red: the cancellation let through while a body is
    read, and while the rest of one is thrown away."""

    async def story() -> None:
        async with listening(FakeEngine(), keys=Keys(["right"])) as port:
            before = asyncio.all_tasks()
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer %b\r\ncontent-length: 9\r\n\r\n"
            writer.write(head % key + b"x")
            await asyncio.sleep(0.2)
            for task in asyncio.all_tasks() - before:
                task.cancel()
            assert status in await asyncio.wait_for(reader.readuntil(b"}}"), 5)
            writer.close()
        assert "Traceback" not in capsys.readouterr().err

    run(story())


def test_a_connection_without_the_head_of_a_request_is_closed(monkeypatch: pytest.MonkeyPatch):
    """A first one, and a second one on a connection that is kept; a request that takes long is not disturbed.

    Mutation tried: uvicorn's own H11Protocol keeps both open.
    """
    monkeypatch.setattr("meshwright.serve.server.HEADER_S", 0.1)

    async def story() -> None:
        async with listening(FakeEngine(step_s=0.1)) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET /health HT")
            assert await asyncio.wait_for(reader.read(), 2) == b""
            writer.close()
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            body = b'{"prompt": "a"}'
            head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 15\r\n\r\n"
            writer.write(head + body)
            answer = await asyncio.wait_for(reader.readuntil(b"}}"), 3)
            assert b"200 OK" in answer and b'"text":"abc"' in answer  # three steps, longer than the head may take
            writer.write(b"GET /hea")
            assert await asyncio.wait_for(reader.read(), 2) == b""
            writer.close()

    run(story())


def test_keys_come_from_a_file_or_the_environment(tmp_path: Path):
    file = tmp_path / "keys"
    file.write_text("# ours\none\n\n two \n")
    keys = read_keys(file, {"MESHWRIGHT_API_KEY": "three"})
    assert keys is not None and "one" not in repr(vars(keys))
    assert [keys.accept(f"Bearer {key}".encode()) for key in ("one", "two", "three", "# ours", "")] == [
        True,
        True,
        False,
        False,
        False,
    ]
    keys = read_keys(None, {"MESHWRIGHT_API_KEY": "three\n"})
    assert keys is not None and keys.accept(b"Bearer three") and not keys.accept(None)
    assert read_keys(None, {}) is None
    for text in ("", "# none\n"):
        file.write_text(text)
        with pytest.raises(UserError, match="has no key"):
            read_keys(file, {})
    file.write_text("two words\n")
    with pytest.raises(UserError, match="visible ASCII") as caught:
        read_keys(file, {})
    assert "two words" not in str(caught.value)
    with pytest.raises(UserError, match="has no key"):
        read_keys(None, {"MESHWRIGHT_API_KEY": " "})
    with pytest.raises(UserError, match="cannot be read"):
        read_keys(tmp_path / "none", {})


def test_the_page_needs_nothing_from_elsewhere():
    async def story() -> None:
        async with served() as here:
            answer = await here.http.get("/")
            assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/html")
            policy = answer.headers["content-security-policy"]
            assert "default-src 'none'" in policy and "unsafe" not in policy and policy.count("sha256-") == 2
            assert "//" not in answer.text.replace("<!doctype html>", "") and "src=" not in answer.text
            assert " style=" not in answer.text and not any(f" on{name}=" in answer.text for name in ("click", "load", "input"))

    run(story())


def test_the_openapi_document_is_true():
    """Every status of the stories here is in it, and what it calls a request is one."""

    async def story() -> None:
        async with served() as here:
            document = (await here.http.get("/openapi.json")).json()
            operation = document["paths"][COMPLETE]["post"]
            assert set(operation["responses"]) == {"200", "400", "404", "408", "413", "415", "429", "500", "503"}
            assert set(operation["responses"]["200"]["content"]) == {"application/json", "text/event-stream"}
            assert set(document["paths"]["/metrics"]["get"]["responses"]["200"]["content"]) == {"text/plain"}
            schema = document["components"]["schemas"]["CompletionRequest"]
            assert schema["additionalProperties"] is False and schema["required"] == ["prompt"]
            assert "securitySchemes" not in document["components"] and "HTTPValidationError" not in json.dumps(document)
            ids = [one["operationId"] for path in document["paths"].values() for one in path.values()]
            assert len(ids) == len(set(ids))

    run(story())
