"""`/v1/files`, `/v1/batches` and `/v1/messages/batches` with the official SDKs: results, bad lines, restarts."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
from anthropic.types.messages import MessageBatch
from openai.types import Batch, CreateEmbeddingResponse
from openai.types.chat import ChatCompletion

from modelyard.core.errors import Unavailable
from modelyard.gateway import batches, records
from modelyard.object_store import SqliteObjectStore
from tests.e2e.helpers import SCRIPT, config, wait_for_running, wait_until, wait_until_idle
from tests.engines.llama_cpp.media_files import picture
from tests.live_server import LiveServer, live_server

KEYS = [{"name": "ada", "key": "sk-ada"}, {"name": "bob", "key": "sk-bob"}]
CHAT = "/v1/chat/completions"


def sdk(server: LiveServer, key: str = "sk-ada") -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key=key, max_retries=0)


def anthropic_sdk(server: LiveServer, key: str = "sk-ada") -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.url, api_key=key, max_retries=0)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    path = tmp_path_factory.mktemp("objects") / "objects.sqlite"
    settings = config(keys=KEYS, store={"objects": str(path)}, batches={"max_file_bytes": 100_000, "max_requests": 50})
    with live_server(settings) as running:
        yield running


@pytest.fixture
def client(server: LiveServer) -> openai.OpenAI:
    return sdk(server)


def chat_line(id: str, text: str = "text", url: str = CHAT, **more: Any) -> dict[str, Any]:
    body = {"model": "demo", "messages": [{"role": "user", "content": text}]}
    return {"custom_id": id, "method": "POST", "url": url, "body": body} | more


def upload(client: openai.OpenAI, *lines: dict[str, Any] | str) -> str:
    data = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    return client.files.create(file=("in.jsonl", data.encode()), purpose="batch").id


def create(client: openai.OpenAI, *lines: dict[str, Any] | str, endpoint: Any = CHAT, **more: Any) -> Batch:
    file = upload(client, *lines)
    return client.batches.create(input_file_id=file, endpoint=endpoint, completion_window="24h", **more)


def ended(client: openai.OpenAI, id: str) -> Batch:
    deadline = time.monotonic() + 60
    while (batch := client.batches.retrieve(id)).status in ("validating", "in_progress", "finalizing", "cancelling"):
        assert time.monotonic() < deadline, batch
        time.sleep(0.03)
    return batch


def rows(client: openai.OpenAI, file: str | None) -> dict[str, Any]:
    assert file is not None
    found = [json.loads(line) for line in client.files.content(file).text.splitlines()]
    return {row["custom_id"]: row for row in found}


def watch_closely(monkeypatch: pytest.MonkeyPatch) -> None:
    """The work of a dead process is taken over at once."""
    monkeypatch.setattr(records, "OWNER_TTL_S", 0.5)
    monkeypatch.setattr(records, "_RENEW_S", 0.05)
    monkeypatch.setattr(batches, "_IDLE_POLL_S", 0.05)


# --- files ------------------------------------------------------------------------------------------------------------


def test_a_file_is_uploaded_read_listed_and_deleted(client: openai.OpenAI) -> None:
    data = b"x" * 70_000 + b"\xff\n"
    made = client.files.create(
        file=("notes.bin", data), purpose="user_data", expires_after={"anchor": "created_at", "seconds": 3600}
    )
    assert (made.object, made.bytes, made.filename, made.purpose) == ("file", len(data), "notes.bin", "user_data")
    assert (made.status, (made.expires_at or 0) - made.created_at) == ("processed", 3600)
    assert client.files.retrieve(made.id) == made
    assert client.files.wait_for_processing(made.id) == made
    assert client.files.content(made.id).content == data
    deleted = client.files.delete(made.id)
    assert (deleted.id, deleted.deleted, deleted.object) == (made.id, True, "file")
    for call in (client.files.retrieve, client.files.content, client.files.delete):
        with pytest.raises(openai.NotFoundError):
            call(made.id)


def test_files_are_listed_by_pages_orders_and_purposes(server: LiveServer) -> None:
    client = sdk(server, "sk-bob")
    made = [client.files.create(file=(f"{n}.txt", b"x"), purpose="user_data").id for n in range(5)]
    batch = upload(client, chat_line("a"))
    assert [file.id for file in client.files.list()] == [batch, *reversed(made)]
    assert [file.id for file in client.files.list(limit=2, order="asc")] == [*made, batch]
    assert [file.id for file in client.files.list(limit=2, purpose="user_data")] == made[::-1]
    assert [file.id for file in client.files.list(purpose="batch")] == [batch]
    page = client.files.list(limit=2)
    assert (len(page.data), page.has_more) == (2, True)
    for file in (*made, batch):
        client.files.delete(file)
    assert list(client.files.list()) == []


@pytest.mark.parametrize(
    ("file", "fields", "status", "param"),
    [
        (("in.txt", b"x"), {"purpose": "batch"}, 400, "file"),
        (("in.jsonl", b"x"), {"purpose": "nonsense"}, 400, "purpose"),
        (("in.jsonl", b"x"), {}, 400, "purpose"),
        (None, {"purpose": "batch", "file": "text"}, 400, "file"),
        (("in.jsonl", b"x"), {"purpose": "batch", "expires_after[seconds]": "9"}, 400, "expires_after.seconds"),
        (("in.jsonl", b"x"), {"purpose": "batch", "expires_after[seconds]": "x"}, 400, "expires_after.seconds"),
        (("in.jsonl", b"x" * 100_001), {"purpose": "batch"}, 413, None),
        (("in.jsonl", b"x" * 3_000_000), {"purpose": "batch"}, 413, None),
    ],
)
def test_a_bad_upload_is_refused_with_the_field(
    server: LiveServer, file: Any, fields: dict[str, str], status: int, param: str | None
) -> None:
    headers = {"authorization": "Bearer sk-ada"}
    files = {"file": file} if file else {"none": ("", b"")}
    reply = httpx.post(server.url + "/v1/files", data=fields, files=files, headers=headers)
    assert (reply.status_code, reply.json()["error"]["param"]) == (status, param), reply.text
    assert "file-" not in httpx.get(server.url + "/v1/files?purpose=nonsense", headers=headers).text


def test_an_upload_that_is_no_form_is_refused(server: LiveServer) -> None:
    for body, kind in (
        (b"{}", "application/json"),
        (b"x", "multipart/form-data"),
        (b"x", "multipart/form-data; boundary=y"),
    ):
        headers = {"authorization": "Bearer sk-ada", "content-type": kind}
        reply = httpx.post(server.url + "/v1/files", content=body, headers=headers)
        assert (reply.status_code, reply.json()["error"]["type"]) == (400, "invalid_request_error")


def test_requests_name_uploaded_files_by_their_ids(tmp_path: Path) -> None:
    settings = config(keys=KEYS, store={"objects": str(tmp_path / "objects.sqlite")})
    settings["models"]["demo"] |= {"modalities": ["text", "image"]}
    settings["models"]["demo"]["script"] = [{"when": "the secret is teal", "steps": [{"text": "Teal."}]}, *SCRIPT]
    with live_server(settings) as server:
        client = sdk(server)
        notes = client.files.create(file=("notes.txt", b"the secret is teal"), purpose="user_data").id
        part: Any = {"type": "input_file", "file_id": notes}
        asked: Any = [{"role": "user", "content": [part, {"type": "input_text", "text": "What is it?"}]}]
        response = client.responses.create(model="demo", input=asked)
        assert response.output_text == "Teal."
        items: Any = client.responses.input_items.list(response.id).data
        assert items[0].content[0].file_id == notes
        chat: Any = [{"role": "user", "content": [{"type": "file", "file": {"file_id": notes}}]}]
        answer = client.chat.completions.create(model="demo", messages=chat)
        assert answer.choices[0].message.content == "Teal."
        image_file = client.files.create(file=("p.png", picture(1)), purpose="vision").id
        image: Any = [{"role": "user", "content": [{"type": "input_image", "file_id": image_file, "detail": "auto"}]}]
        assert client.responses.create(model="demo", input=image).status == "completed"
        binary = client.files.create(file=("x.bin", b"\xff\x00"), purpose="user_data").id
        part["file_id"] = binary
        with pytest.raises(openai.BadRequestError, match="neither an image"):
            client.responses.create(model="demo", input=asked)
        part["file_id"] = notes
        with pytest.raises(openai.BadRequestError) as error:
            sdk(server, "sk-bob").responses.create(model="demo", input=asked)
        assert error.value.code == "file_not_found"


# --- OpenAI's batches -------------------------------------------------------------------------------------------------


def test_a_batch_runs_all_its_requests(client: openai.OpenAI) -> None:
    made = create(client, *[chat_line(f"r{n}") for n in range(20)], metadata={"job": "7"})
    assert (made.status, made.object, made.completion_window) == ("validating", "batch", "24h")
    assert made.expires_at == made.created_at + 86_400
    batch = ended(client, made.id)
    assert (batch.status, batch.model, batch.metadata) == ("completed", "demo", {"job": "7"})
    assert batch.request_counts is not None
    assert batch.request_counts.to_dict() == {"total": 20, "completed": 20, "failed": 0}
    assert batch.usage is not None
    assert batch.usage.total_tokens == batch.usage.input_tokens + batch.usage.output_tokens > 20
    times = (batch.created_at, batch.in_progress_at, batch.finalizing_at, batch.completed_at)
    assert list(times) == sorted(times)  # type: ignore[type-var]
    assert (batch.error_file_id, batch.errors) == (None, None)
    found = rows(client, batch.output_file_id)
    assert sorted(found) == sorted(f"r{n}" for n in range(20))
    row = found["r3"]
    assert (row["response"]["status_code"], row["error"]) == (200, None)
    assert row["response"]["request_id"].startswith("req_")
    completion = ChatCompletion.model_validate(row["response"]["body"])
    assert completion.choices[0].message.content == "Hello there, friend."
    assert len({row["id"] for row in found.values()}) == 20
    output = client.files.retrieve(batch.output_file_id or "")
    assert (output.purpose, output.filename) == ("batch_output", f"{batch.id}_output.jsonl")


@pytest.mark.parametrize(
    ("endpoint", "body", "part"),
    [
        ("/v1/responses", {"model": "demo", "input": "text"}, "Hello there, friend."),
        ("/v1/completions", {"model": "demo", "prompt": "text"}, "text_completion"),
    ],
)
def test_each_endpoint_runs_in_a_batch(client: openai.OpenAI, endpoint: str, body: Any, part: str) -> None:
    line = {"custom_id": "a", "method": "POST", "url": endpoint, "body": body}
    batch = ended(client, create(client, line, endpoint=endpoint).id)
    assert part in json.dumps(rows(client, batch.output_file_id)["a"]["response"]["body"])
    assert batch.usage is not None
    assert batch.usage.output_tokens > 0


def test_embeddings_run_in_a_batch(client: openai.OpenAI) -> None:
    line = {"custom_id": "a", "method": "POST", "url": "/v1/embeddings", "body": {"model": "demo", "input": "Hi"}}
    batch = ended(client, create(client, line, endpoint="/v1/embeddings").id)
    body = rows(client, batch.output_file_id)["a"]["response"]["body"]
    assert len(CreateEmbeddingResponse.model_validate(body).data[0].embedding) == 64


def test_each_bad_line_has_an_error_row_and_the_others_run(client: openai.OpenAI) -> None:
    batch = create(
        client,
        chat_line("good"),
        "not json",
        "",
        chat_line("good"),
        chat_line("no-method", method=None),
        chat_line("other-url", url="/v1/responses"),
        chat_line("no-body", body=None),
        chat_line("stream", body={"model": "demo", "messages": [], "stream": True}),
        chat_line("refused", body={"model": "demo", "messages": 7}),
        chat_line("fails", "error before"),
        {"method": "POST", "url": CHAT, "body": {}},
    )
    batch = ended(client, batch.id)
    assert batch.status == "completed"
    assert batch.request_counts is not None
    assert batch.request_counts.to_dict() == {"total": 10, "completed": 1, "failed": 9}
    assert list(rows(client, batch.output_file_id)) == ["good"]
    content = client.files.content(batch.error_file_id or "").text
    errors = [json.loads(line) for line in content.splitlines()]
    codes = {(row["custom_id"], row["error"]["code"]) for row in errors if row["error"]}
    assert codes == {
        (None, "invalid_json_line"),
        ("good", "duplicate_custom_id"),
        ("no-method", "invalid_method"),
        ("other-url", "mismatched_endpoint"),
        ("no-body", "invalid_request"),
        ("stream", "invalid_request"),
        (None, "invalid_custom_id"),
    }
    (refused,) = [row for row in errors if row["custom_id"] == "refused"]
    assert refused["response"]["status_code"] == 400
    assert "messages" in refused["response"]["body"]["error"]["message"]
    (fails,) = [row for row in errors if row["custom_id"] == "fails"]
    assert (fails["response"]["status_code"], "out of memory" in str(fails)) == (500, True)
    assert "line 2:" in content


@pytest.mark.parametrize(
    ("lines", "code"), [([], "empty_file"), ([chat_line(f"{n}") for n in range(51)], "too_many_requests")]
)
def test_a_batch_without_a_usable_file_fails(client: openai.OpenAI, lines: list[Any], code: str) -> None:
    batch = ended(client, create(client, *lines).id)
    assert batch.status == "failed"
    assert batch.errors is not None
    assert [error.code for error in batch.errors.data or []] == [code]
    assert batch.failed_at is not None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"endpoint": "/v1/images/edits"}, "endpoint"),
        ({"completion_window": "soon"}, "completion_window"),
        ({"completion_window": "31d"}, "completion_window"),
        ({"input_file_id": "file-none"}, "input_file_id"),
        ({"input_file_id": None}, "input_file_id"),
        ({"metadata": {"a": 1}}, "metadata"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 1}}, "output_expires_after.seconds"),
    ],
)
def test_a_bad_batch_is_refused_with_the_field(client: openai.OpenAI, fields: Any, param: str) -> None:
    file = upload(client, chat_line("a"))
    with pytest.raises(openai.BadRequestError) as error:
        client.batches.create(input_file_id=file, endpoint=CHAT, completion_window="24h", extra_body=fields)
    assert (error.value.param or "").startswith(param)
    other = client.files.create(file=("x.jsonl", b"{}"), purpose="user_data").id
    with pytest.raises(openai.BadRequestError, match="purpose"):
        client.batches.create(input_file_id=other, endpoint=CHAT, completion_window="24h")


def test_a_cancelled_batch_stops_its_lines_and_says_which_were_not_run(
    server: LiveServer, client: openai.OpenAI
) -> None:
    lines = [chat_line("done"), *[chat_line(f"endless{n}", "endless stream") for n in range(12)]]
    id = create(client, *lines, output_expires_after={"anchor": "created_at", "seconds": 3600}).id
    wait_for_running(server, 4)
    wait_until(lambda: client.batches.retrieve(id).request_counts.completed == 1, "a line is counted")  # type: ignore[union-attr]
    assert client.batches.cancel(id).status == "cancelling"
    batch = ended(client, id)
    assert (batch.status, batch.cancelled_at is not None) == ("cancelled", True)
    assert list(rows(client, batch.output_file_id)) == ["done"]
    errors = rows(client, batch.error_file_id)
    assert len(errors) == 12
    assert {row["error"]["code"] for row in errors.values()} == {"batch_cancelled"}
    output = client.files.retrieve(batch.output_file_id or "")
    assert (output.expires_at or 0) - output.created_at == 3600
    with pytest.raises(openai.ConflictError):
        client.batches.cancel(id)
    wait_until_idle(server)


def test_batches_are_listed_by_pages_newest_first_for_their_key_only(server: LiveServer) -> None:
    client, ada = sdk(server, "sk-bob"), sdk(server)
    made = [create(client, chat_line("a")).id for _ in range(5)]
    assert [batch.id for batch in client.batches.list(limit=2)] == made[::-1]
    page = client.batches.list(limit=2)
    assert (len(page.data), page.has_more) == (2, True)
    assert not {batch.id for batch in ada.batches.list(limit=100)} & set(made)
    file = client.batches.retrieve(made[0]).input_file_id
    for call in (ada.files.retrieve, ada.files.content, ada.files.delete):
        with pytest.raises(openai.NotFoundError):
            call(file)
    for call in (ada.batches.retrieve, ada.batches.cancel):
        with pytest.raises(openai.NotFoundError):
            call(made[0])
    with pytest.raises(openai.BadRequestError, match="file"):
        ada.batches.create(input_file_id=file, endpoint=CHAT, completion_window="24h")
    for id in made:
        ended(client, id)


def test_other_requests_go_before_those_of_a_batch(tmp_path: Path) -> None:
    settings = config(
        caches={"main": {"model": "demo", "n_ctx": 4096, "parallel": 1}},
        routes=[{"match": "*", "cache": "main"}],
        store={"objects": str(tmp_path / "objects.sqlite")},
    )
    with live_server(settings) as server:
        client = sdk(server)
        id = create(client, *[chat_line(f"{n}", "slow prefill") for n in range(4)]).id
        wait_until(lambda: server.status("demo").waiting == 3, "the lines wait")
        live = httpx.get(server.url + "/v1/admin/requests", headers=server.owner).text
        assert '"background"' in live
        client.chat.completions.create(model="demo", messages=[{"role": "user", "content": "text"}])
        counts = client.batches.retrieve(id).request_counts
        assert counts is not None
        assert counts.completed <= 2
        assert ended(client, id).status == "completed"


def test_a_line_waits_while_its_key_is_over_its_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "_WAIT_S", (0.01, 0.1))
    settings = config(
        keys=[{"name": "ada", "key": "sk-ada", "max_concurrent": 1}],
        store={"objects": str(tmp_path / "objects.sqlite")},
    )
    with live_server(settings) as server:
        client = sdk(server)
        batch = ended(client, create(client, *[chat_line(f"{n}") for n in range(10)]).id)
        assert batch.request_counts is not None
        assert batch.request_counts.to_dict() == {"total": 10, "completed": 10, "failed": 0}


def test_an_expired_batch_keeps_its_results_and_names_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with live_server(config(store={"objects": str(tmp_path / "objects.sqlite")})) as server:
        client = sdk(server)
        monkeypatch.setattr("modelyard.protocols.openai_batches._read_window", lambda _: 2)
        id = create(client, chat_line("done"), chat_line("endless", "endless stream")).id
        batch = ended(client, id)
        assert (batch.status, batch.expired_at is not None) == ("expired", True)
        assert list(rows(client, batch.output_file_id)) == ["done"]
        errors = rows(client, batch.error_file_id)
        assert [(id, row["error"]["code"]) for id, row in errors.items()] == [("endless", "batch_expired")]
        wait_until_idle(server)


def test_a_revoked_key_runs_nothing_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watch_closely(monkeypatch)
    store = {"objects": str(tmp_path / "objects.sqlite")}
    with live_server(config(keys=KEYS, store=store)) as server:
        id = create(sdk(server), chat_line("endless", "endless stream")).id
        wait_for_running(server, 1)
    with live_server(config(keys=KEYS[1:], store=store)) as server:
        with pytest.raises(openai.AuthenticationError):
            sdk(server).batches.retrieve(id)
        wait_until(lambda: b"the API key" in (tmp_path / "objects.sqlite-wal").read_bytes(), "the line is refused")
    with live_server(config(keys=KEYS, store=store)) as server:
        batch = ended(sdk(server), id)
        assert rows(sdk(server), batch.error_file_id)["endless"]["response"]["status_code"] == 401


# --- restarts ---------------------------------------------------------------------------------------------------------


def test_after_a_restart_only_the_lines_without_a_result_are_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test server stops without closing anything, as if it had been killed."""
    watch_closely(monkeypatch)
    store = {"objects": str(tmp_path / "objects.sqlite")}
    with live_server(config(store=store)) as server:
        client = sdk(server)
        id = create(client, *[chat_line(f"done{n}") for n in range(5)], chat_line("open", "endless stream")).id
        wait_until(lambda: client.batches.retrieve(id).request_counts.completed == 5, "five lines")  # type: ignore[union-attr]
    settings = config(store=store)
    settings["models"]["demo"]["script"] = [{"steps": [{"text": "After the restart."}]}]
    with live_server(settings) as server:
        batch = ended(sdk(server), id)
        assert batch.status == "completed"
        found = rows(sdk(server), batch.output_file_id)
        texts = {id: row["response"]["body"]["choices"][0]["message"]["content"] for id, row in found.items()}
        assert texts == {f"done{n}": "Hello there, friend." for n in range(5)} | {"open": "After the restart."}


def test_a_batch_whose_process_is_gone_is_run_by_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watch_closely(monkeypatch)
    settings = config(store={"objects": str(tmp_path / "objects.sqlite")})
    other = config(store={"objects": str(tmp_path / "objects.sqlite")})
    other["models"]["demo"]["script"] = [{"steps": [{"text": "From the other."}]}]
    with live_server(other) as second:
        with live_server(settings) as first:
            id = create(sdk(first), chat_line("a", "endless stream")).id
            other_client = sdk(second)
            wait_until(
                lambda: first.status("demo").running or other_client.batches.retrieve(id).status == "completed",
                "one of them runs it",
            )
        batch = ended(sdk(second), id)
        assert batch.status == "completed"
        assert "From the other." in str(rows(sdk(second), batch.output_file_id))


def test_a_result_that_cannot_be_stored_is_stored_later(
    server: LiveServer, client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(batches, "_WAIT_S", (0.01, 0.02))
    real_swap, failures = SqliteObjectStore.swap, [0]

    async def swap(self: SqliteObjectStore, scope: str, *args: Any) -> bool:
        if scope.endswith("/rows") and failures[0] < 5:
            failures[0] += 1
            raise Unavailable("database or disk is full")
        return await real_swap(self, scope, *args)

    monkeypatch.setattr(SqliteObjectStore, "swap", swap)
    batch = ended(client, create(client, chat_line("a")).id)
    assert (batch.status, failures) == ("completed", [5])
    assert "a line of a batch was not stored" in caplog.text


# --- Anthropic's batches ----------------------------------------------------------------------------------------------


def message_request(id: str, text: str = "text", **more: Any) -> Any:
    params = {"model": "demo", "max_tokens": 64, "messages": [{"role": "user", "content": text}]}
    return {"custom_id": id, "params": params | more}


def ended_messages(client: anthropic.Anthropic, id: str) -> MessageBatch:
    deadline = time.monotonic() + 60
    while (batch := client.messages.batches.retrieve(id)).processing_status != "ended":
        assert time.monotonic() < deadline, batch
        time.sleep(0.03)
    return batch


def test_a_message_batch_runs_and_has_results(server: LiveServer) -> None:
    client = anthropic_sdk(server)
    requests = [message_request(f"r{n}") for n in range(5)]
    requests += [message_request("bad", max_tokens=-1), message_request("stream", stream=True)]
    made = client.messages.batches.create(requests=requests)
    assert (made.type, made.processing_status, made.results_url) == ("message_batch", "in_progress", None)
    assert made.request_counts.to_dict() == {
        "processing": 7, "succeeded": 0, "errored": 0, "canceled": 0, "expired": 0
    }  # fmt: skip
    assert (made.expires_at - made.created_at).total_seconds() == 86_400
    batch = ended_messages(client, made.id)
    assert (batch.request_counts.succeeded, batch.request_counts.errored) == (5, 2)
    assert batch.ended_at is not None
    results = {row.custom_id: row.result for row in client.messages.batches.results(made.id)}
    assert sorted(results) == sorted(request["custom_id"] for request in requests)
    good, bad, stream = results["r2"], results["bad"], results["stream"]
    assert good.type == "succeeded"
    assert good.message.content[0].text == "Hello there, friend."  # type: ignore[union-attr]
    assert bad.type == stream.type == "errored"
    assert "max_tokens" in bad.error.error.message  # type: ignore[union-attr]
    assert bad.error.error.type == "invalid_request_error"  # type: ignore[union-attr]
    deleted = client.messages.batches.delete(made.id)
    assert (deleted.id, deleted.type) == (made.id, "message_batch_deleted")
    with pytest.raises(anthropic.NotFoundError):
        client.messages.batches.retrieve(made.id)


def test_a_message_batch_is_cancelled(server: LiveServer) -> None:
    client = anthropic_sdk(server)
    id = client.messages.batches.create(requests=[message_request("a", "endless stream")]).id
    wait_for_running(server, 1)
    with pytest.raises(anthropic.ConflictError):
        client.messages.batches.delete(id)
    reply = httpx.get(f"{server.url}/v1/messages/batches/{id}/results", headers={"x-api-key": "sk-ada"})
    assert (reply.status_code, reply.json()["type"]) == (409, "error")
    cancelled = client.messages.batches.cancel(id)
    assert (cancelled.processing_status, cancelled.cancel_initiated_at is not None) == ("canceling", True)
    batch = ended_messages(client, id)
    assert batch.request_counts.canceled == 1
    assert [row.result.type for row in client.messages.batches.results(id)] == ["canceled"]
    wait_until_idle(server)


def test_message_batches_are_listed_by_pages_for_their_key_only(server: LiveServer) -> None:
    client, ada = anthropic_sdk(server, "sk-bob"), anthropic_sdk(server)
    made = [client.messages.batches.create(requests=[message_request("a")]).id for _ in range(5)]
    assert [batch.id for batch in client.messages.batches.list(limit=2)] == made[::-1]
    page = client.messages.batches.list(limit=2, before_id=made[0])
    assert [batch.id for batch in page.data] == [made[2], made[1]]
    assert [batch.id for batch in client.beta.messages.batches.list(limit=100)] == made[::-1]
    of_ada = ada.messages.batches
    for call in (of_ada.retrieve, of_ada.cancel, of_ada.delete, of_ada.results):
        with pytest.raises(anthropic.NotFoundError):
            call(made[0])
    for id in made:
        ended_messages(client, id)


@pytest.mark.parametrize(
    "requests",
    [
        [],
        [message_request("a"), message_request("a")],
        [message_request("a b")],
        [{"params": {}}],
        [message_request(f"{n}") for n in range(51)],
    ],
)
def test_a_bad_message_batch_is_refused(server: LiveServer, requests: Any) -> None:
    with pytest.raises(anthropic.BadRequestError) as error:
        anthropic_sdk(server).messages.batches.create(requests=requests)
    assert "requests" in str(error.value) or "custom_id" in str(error.value)
