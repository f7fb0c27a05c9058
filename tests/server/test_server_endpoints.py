"""The smaller endpoints: one good and one bad request each."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path

import pytest

import runtime
from tests.server.serving import CHAT, Served, serving


async def test_health_tells_the_phase_then_ok() -> None:
    async with serving(attach=False) as served:
        status, body = await served.get("/health")
        assert status == 503
        assert body["error"] == {
            "code": 503,
            "message": "Loading model",
            "type": "unavailable_error",
        }
        assert body["loading"]["phase"] == "waiting"
        for path in ("/v1/chat/completions", "/completion"):
            status, body = await served.post(path, CHAT | {"prompt": "x"})
            assert status == 503
            assert body["error"]["message"] == "Loading model"
        served.service.listening.set()
        await served.service.attached.wait()
        assert await served.get("/v1/health") == (200, {"status": "ok"})
        async with served.session.head(served.url + "/health") as response:
            assert response.status == 200


async def test_models(served: Served) -> None:
    status, body = await served.get("/v1/models")
    assert status == 200
    assert body["data"][0]["id"] == body["models"][0]["name"] == "fake"
    assert body["data"][0]["meta"]["n_vocab"] == 259
    assert body["data"][0]["meta"]["vocab_type"] == 2
    # Ollama's clients read strings here, present or not.
    assert body["models"][0]["details"]["family"] == ""
    assert await served.get("/models") == (status, body)


async def test_alias_names_the_model() -> None:
    async with serving(aliases=("mine", "other")) as served:
        _, body = await served.get("/v1/models")
        assert body["data"][0]["id"] == "mine"
        assert body["data"][0]["aliases"] == ["mine", "other"]
        _, answer = await served.post("/v1/chat/completions", CHAT | {"model": "whatever"})
        assert answer["model"] == "mine"


@pytest.mark.parametrize(
    ("body", "ids"),
    [
        ({"content": "ab"}, [97, 98]),
        ({"content": ["a", 98, "c"]}, [97, 98, 99]),
        ({"content": "<|im_end|>"}, [258]),
        ({"content": "a<|im_end|>", "parse_special": False}, [97, *b"<|im_end|>"]),
        ({"content": None}, []),
        ({}, []),
        ({"content": ""}, []),
    ],
)
async def test_tokenize(served: Served, body: dict[str, object], ids: list[int]) -> None:
    assert await served.post("/tokenize", body) == (200, {"tokens": ids})


async def test_tokenize_with_pieces(served: Served) -> None:
    _, body = await served.post("/tokenize", {"content": "aß", "with_pieces": True})
    assert body["tokens"][0] == {"id": 97, "piece": "a"}
    assert [entry["piece"] for entry in body["tokens"][1:]] == [[0xC3], [0x9F]]


@pytest.mark.parametrize("content", [1, True, {"a": 1}, [1.5], ["a", None], [259], [-1], [2**40]])
async def test_tokenize_refuses(served: Served, content: object) -> None:
    status, body = await served.post("/tokenize", {"content": content})
    assert status == 400
    assert "content" in body["error"]["message"]


async def test_detokenize(served: Served) -> None:
    assert await served.post("/detokenize", {"tokens": [97, 98, 258]}) == (
        200,
        {"content": "ab<|im_end|>"},
    )


@pytest.mark.parametrize("tokens", [None, "ab", 5, ["a"], [259], [-1], [2**40], [True], [1.5]])
async def test_detokenize_refuses(served: Served, tokens: object) -> None:
    status, body = await served.post("/detokenize", {"tokens": tokens})
    assert status == 400
    assert "tokens" in body["error"]["message"]


async def test_apply_template(served: Served) -> None:
    status, body = await served.post("/apply-template", CHAT)
    assert status == 200
    assert body == {"prompt": "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"}
    status, _ = await served.post("/apply-template", {"messages": "hi"})
    assert status == 400


async def test_trailing_assistant_message_is_continued(served: Served) -> None:
    messages = [*CHAT["messages"], {"role": "assistant", "content": "Well, "}]  # type: ignore[misc]
    _, body = await served.post("/apply-template", {"messages": messages})
    assert body["prompt"].endswith("<|im_start|>assistant\nWell, ")
    async with serving(prefill_assistant=False) as other:
        _, body = await other.post("/apply-template", {"messages": messages})
        assert body["prompt"].endswith("Well, <|im_end|>\n<|im_start|>assistant\n")
    twice = [*messages, {"role": "assistant", "content": "b"}]
    status, _ = await served.post("/v1/chat/completions", {"messages": twice})
    assert status == 400


async def test_control_text_in_contents_stays_text(served: Served) -> None:
    message = {"role": "user", "content": "<|im_end|>"}
    _, answer = await served.post("/v1/chat/completions", {"messages": [message], "max_tokens": 1})
    plain = len("<|im_end|>") + len("user\n") + 1 + len("assistant\n") + 3
    assert answer["usage"]["prompt_tokens"] == plain


async def test_own_chat_template() -> None:
    template = "{% for m in messages %}[{{ m['content'] }}]{% endfor %}{{ tone }}"
    async with serving(chat_template=template, chat_template_kwargs={"tone": "!"}) as served:
        _, body = await served.post("/apply-template", CHAT)
        assert body == {"prompt": "[hi]!"}
        _, body = await served.post(
            "/apply-template", CHAT | {"chat_template_kwargs": {"tone": "?"}}
        )
        assert body == {"prompt": "[hi]?"}


async def test_a_slow_template_of_the_command_line_does_not_hold_up_the_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads = []

    def compile_slowly(*_: object) -> None:
        threads.append(threading.current_thread())

    monkeypatch.setattr("server.service._override", compile_slowly)
    async with serving(chat_template="{{ 1 }}"):
        assert threads
        assert threads[0] is not threading.main_thread()


async def test_props_survive_a_template_that_fails_its_limits() -> None:
    template = "{{ 'a' * 10**9 }}"
    async with serving(chat_template=template) as served:
        status, body = await served.get("/props")
        assert status == 200
        assert (body["chat_template"], body["chat_template_caps"]) == (template, {})
        assert (await served.post("/v1/chat/completions", CHAT))[0] == 400


async def test_props(served: Served) -> None:
    status, body = await served.get("/props")
    assert status == 200
    assert body["total_slots"] == 4
    assert body["model_ftype"] == ""  # a name such as "Q4_K - Medium"; the fake model has none
    assert body["default_generation_settings"]["n_ctx"] == 4096
    assert body["default_generation_settings"]["params"]["top_k"] == 40
    assert "im_start" in body["chat_template"]
    assert body["engine"]["device"] == "fake"
    status, body = await served.post("/props", {})
    assert (status, body["error"]["type"]) == (501, "not_supported_error")


async def test_sampling_defaults_come_from_the_command_line() -> None:
    async with serving(sampling={"temperature": 0.0, "top_k": 7, "max_tokens": 3}) as served:
        _, body = await served.get("/props")
        assert body["default_generation_settings"]["params"]["top_k"] == 7
        _, answer = await served.post("/completion", {"prompt": "x", "top_k": None})
        assert answer["generation_settings"]["top_k"] == 7
        assert answer["tokens_predicted"] <= 3


async def test_slots(served: Served) -> None:
    status, body = await served.get("/slots")
    assert status == 200
    assert [slot["id"] for slot in body] == [0, 1, 2, 3]
    await served.post("/completion", {"prompt": "abc", "n_predict": 2, "ignore_eos": True})
    _, body = await served.get("/slots")
    used = [slot for slot in body if "id_task" in slot]
    assert len(used) == 1
    assert used[0]["n_prompt_tokens"] == 3
    assert used[0]["next_token"][0]["n_decoded"] == 2
    assert "prompt" not in used[0]


async def test_no_free_slot_on_request() -> None:
    async with serving(runtime.EngineConfig(device="fake", n_parallel=1)) as served:
        assert (await served.get("/slots?fail_on_no_slot=1"))[0] == 200
        with served.device.hold() as gate:
            running = asyncio.create_task(served.post("/completion", {"prompt": "x"}))
            await gate.reached()
            status, body = await served.get("/slots?fail_on_no_slot=1")
            assert (status, body["error"]["type"]) == (503, "unavailable_error")
        assert (await running)[0] == 200


async def test_switched_off_endpoints_are_501() -> None:
    async with serving(slots=False, metrics=False) as served:
        for path in ("/slots", "/metrics"):
            status, body = await served.get(path)
            assert (status, body["error"]["type"]) == (501, "not_supported_error")
        status, _ = await served.post("/slots/0?action=save", {"filename": "x"})
        assert status == 501


async def test_slot_save_restore_erase(tmp_path: Path) -> None:
    async with serving(slot_save_path=tmp_path) as served:
        prompt = "a prompt that is longer than one page of the cache"
        _, answer = await served.post("/completion", {"prompt": prompt, "n_predict": 1})
        slot = f"/slots/{answer['id_slot']}"
        status, saved = await served.post(f"{slot}?action=save", {"filename": "a.bin"})
        assert status == 200
        assert saved["n_written"] == (tmp_path / "a.bin").stat().st_size
        # The token generated last has no KV yet.
        assert saved["n_saved"] == answer["tokens_evaluated"] + answer["tokens_predicted"] - 1
        status, erased = await served.post(f"{slot}?action=erase", {})
        assert status == 200
        assert erased["n_erased"] > 0
        _, cold = await served.post("/completion", {"prompt": prompt, "n_predict": 0})
        assert cold["timings"]["cache_n"] == 0
        await served.post(f"/slots/{cold['id_slot']}?action=erase", {})
        status, restored = await served.post(f"{slot}?action=restore", {"filename": "a.bin"})
        assert status == 200
        assert restored["n_read"] == saved["n_written"]
        assert restored["n_restored"] == saved["n_saved"]
        # What a slot got by a restore counts, not what ran in it before.
        elsewhere = f"/slots/{(answer['id_slot'] + 1) % 4}"
        await served.post(f"{elsewhere}?action=restore", {"filename": "a.bin"})
        _, again = await served.post(f"{elsewhere}?action=save", {"filename": "b.bin"})
        assert again["n_saved"] == saved["n_saved"]
        assert (tmp_path / "b.bin").read_bytes() == (tmp_path / "a.bin").read_bytes()
        _, warm = await served.post("/completion", {"prompt": prompt, "n_predict": 0})
        assert warm["timings"]["cache_n"] > 0


@pytest.mark.parametrize(
    "name",
    [
        "../x",
        "/etc/passwd",
        "a/b",
        "..",
        ".",
        ".hidden",
        "",
        "a\0b",
        "a\nb",
        "x" * 300,
        5,
        None,
        "a.",
    ],
)
async def test_slot_files_have_no_path(tmp_path: Path, name: object) -> None:
    async with serving(slot_save_path=tmp_path) as served:
        for action in ("save", "restore"):
            status, body = await served.post(f"/slots/0?action={action}", {"filename": name})
            assert status == 400
            assert "filename" in body["error"]["message"]
    assert os.listdir(tmp_path) == []


async def test_slot_files_are_not_followed_nor_trusted(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_bytes(b"secret")
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "link").symlink_to(outside)
    (folder / "junk").write_bytes(b"\x93junk" * 100)
    (folder / "sub").mkdir()
    async with serving(slot_save_path=folder) as served:
        for name in ("link", "junk", "sub", "absent"):
            status, _ = await served.post("/slots/0?action=restore", {"filename": name})
            assert status == 400, name


@pytest.mark.parametrize("slot", ["4", "-1", "x", "99999999999", "0x1", "%20"])
async def test_slot_ids_are_checked(tmp_path: Path, slot: str) -> None:
    async with serving(slot_save_path=tmp_path) as served:
        status, _ = await served.post(f"/slots/{slot}?action=erase", {})
        assert status == 400
        status, _ = await served.post("/slots/0?action=explode", {})
        assert status == 400


async def test_metrics(served: Served) -> None:
    await served.post("/completion", {"prompt": "abc", "n_predict": 2, "ignore_eos": True})
    async with served.session.get(served.url + "/metrics") as response:
        assert response.status == 200
        assert response.headers["Content-Type"].startswith("text/plain")
        assert "Process-Start-Time-Unix" in response.headers
        values = dict(
            line.rsplit(" ", 1) for line in (await response.text()).splitlines() if line[0] != "#"
        )
    assert float(values["llamacpp:prompt_tokens_total"]) == 3
    assert float(values["llamacpp:tokens_predicted_total"]) == 2
    assert float(values["llamacpp:requests_processing"]) == 0
    assert float(values["hotexpert_ready"]) == 1
    assert {"llamacpp:n_decode_total", "llamacpp:n_tokens_max", "hotexpert_kv_pages"} <= set(values)
    assert float(values['hotexpert_tokens_total{phase="prompt"}']) == 3
    assert float(values['hotexpert_tokens_total{phase="decode"}']) == 2
    assert float(values["hotexpert_queue"]) == 0
    assert not [name for name in values if name.startswith("hotexpert_expert")], "none move"


async def test_unknown_paths_and_methods_are_404(served: Served) -> None:
    expected = {"code": 404, "message": "File Not Found", "type": "not_found_error"}
    for path in ("/nope", "/v1/completion", "/completion", "/v1/chat/completions", "/slots/0"):
        assert await served.get(path) == (404, {"error": expected})


async def test_api_prefix_moves_everything() -> None:
    async with serving(api_prefix="/llm") as served:
        assert (await served.get("/health"))[0] == 200  # the URL has the prefix
        root = served.url.removesuffix("/llm")
        async with served.session.get(root + "/health") as response:
            assert response.status == 404


async def test_a_failing_step_is_500_and_the_engine_lives(served: Served) -> None:
    served.device.fail_when(lambda step: True)
    status, body = await served.post("/completion", {"prompt": "x", "n_predict": 2})
    assert (status, body["error"]["type"]) == (500, "server_error")
    served.device.fail_when(None)
    status, _ = await served.post("/completion", {"prompt": "x", "n_predict": 2})
    assert status == 200


async def test_a_broken_engine_ends_the_service_with_its_cause(served: Served) -> None:
    served.device.break_down(RuntimeError("the device is gone"))
    status, _ = await served.post("/completion", {"prompt": "x", "n_predict": 2})
    assert status == 503
    error = await served.service.failed
    assert "the device is gone" in str(error)
    assert (await served.get("/health"))[0] == 503
