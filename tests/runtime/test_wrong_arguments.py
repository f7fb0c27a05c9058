"""Whatever of the public API is given a value of the wrong kind says which, by a typed error."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass, fields

import pytest

import runtime
from runtime.checks import shown
from runtime.config import BUNDLED_MODEL
from runtime.engine.params import LIMITS
from tests.support.fake_engine import GREEDY, read

CONFIG = runtime.EngineConfig(device="fake", n_ctx=64)

VALUES: dict[str, object] = {
    "None": None,
    "True": True,
    "0": 0,
    "-1": -1,
    "2": 2,
    "1.5": 1.5,
    "huge": 10**5000,
    "-huge": -(10**5000),
    "NaN": float("nan"),
    "inf": float("inf"),
    "empty": "",
    "text": "x",
    "digit": "8",
    "NUL": "a\0b",
    "bytes": b"x",
    "list": [],
    "[None]": [None],
    "[[]]": [[]],
    "[NaN]": [float("nan")],
    "[huge]": [10**5000],
    "['x']": ["x"],
    "[True]": [True],
    "dict": {},
    "{1: 2}": {1: 2},
    "set": {1},
    "object": object(),
    "class": int,
    "function": lambda *_: None,
    "complex": 1j,
    "exception": Exception("x"),
}
NUMBERS = ("0", "-1", "2", "1.5", "huge", "-huge", "inf")
TEXTS = ("empty", "text", "digit", "NUL")
CALLABLE = ("None", "class", "function")
FLAG = ("True",)


@dataclass(frozen=True)
class Row:
    """A parameter: what it is called in the error, how to give it, which of VALUES may be right.

    give: with an open engine and a value; may return an awaitable.
    """

    name: str
    give: Callable[[runtime.Engine, object], object]
    may: tuple[str, ...] = ()
    error: type[runtime.EngineError] = runtime.RequestError


def config_row(name: str, *may: str) -> Row:
    return Row(name, lambda _, v: runtime.EngineConfig(**{name: v}), may, runtime.ConfigError)


def params_row(name: str, *may: str) -> Row:
    return Row(name, lambda _, v: runtime.SamplingParams(**{name: v}), may)


def request_row(name: str, *may: str) -> Row:
    return Row(name, lambda e, v: read(e, "a", GREEDY(max_tokens=1), **{name: v}), may)


USER = {"role": "user", "content": "a"}
WHOLE = ("None", "2")
CONFIG_ROWS = (
    config_row("model", "None", "text", "digit"),
    *(config_row(n, *WHOLE) for n in ("n_ctx", "n_parallel", "n_threads", "n_batch")),
    *(config_row(n, *WHOLE, "0") for n in ("vram_reserve", "n_snapshots")),
    config_row("main_gpu", "0", "2"),
    config_row("moe_expert_cache", "-1", "0", "2"),
    *(config_row(n) for n in ("cache_type_k", "cache_type_v", "device", "split_mode", "load_mode")),
    config_row("vram_limit", "None", "2", "1.5"),
    config_row("tensor_split", "None"),
    config_row("moe_cache", "list"),
    *(config_row(n, *FLAG) for n in ("prefix_cache", "name_bus_errors")),
)
TEXT_LISTS = ("list", "['x']", "dict", *TEXTS)
PARAMS_ROWS = (
    *(params_row(name, *NUMBERS) for name in LIMITS),
    params_row("max_tokens", "None", "0", "-1", "2"),
    params_row("seed", "0", "-1", "2", "huge", "-huge"),
    *(params_row(name, *TEXT_LISTS) for name in ("stop", "samplers", "dry_sequence_breakers")),
    params_row("logit_bias", "list", "dict", "{1: 2}"),
    *(params_row(n, *FLAG) for n in ("ignore_eos", "logprobs", "post_sampling_probs")),
)
OTHER_ROWS = (
    Row("prompt", lambda e, v: read(e, v, GREEDY(max_tokens=1)), ("text", "digit", "NUL")),
    request_row("n", "2"),
    request_row("reuse_prefix", *FLAG),
    request_row("special", *FLAG),
    request_row("on_progress", *CALLABLE),
    Row("params", lambda e, v: anext(e.generate("a", v)), ("None",)),
    Row("text", lambda e, v: e.tokenize(v), TEXTS),
    Row("guard", lambda e, v: e.tokenize("a", guard=v), ("None", *TEXTS)),
    Row("add_special", lambda e, v: e.tokenize("a", add_special=v), FLAG),
    Row("parse_special", lambda e, v: e.tokenize("a", parse_special=v), FLAG),
    Row("messages", lambda e, v: e.chat_prompt(v), ("list",)),
    Row("messages[0]", lambda e, v: e.chat_prompt([v])),
    Row(
        "messages[0].content",
        lambda e, v: e.chat_prompt([USER | {"content": v}]),
        ("None", "list", *TEXTS),
    ),
    Row("tools", lambda e, v: e.chat_prompt([USER], tools=v), ("None", "list")),
    Row("template", lambda e, v: e.chat_prompt([USER], template=v), ("None",)),
    Row("instrument", lambda e, v: e.attach(v), (), runtime.ConfigError),
    Row("vram", lambda e, v: e.resize(v), (), runtime.ConfigError),
    Row("id_slot", lambda e, v: e.save_slot(v), ()),
    Row("id_slot", lambda e, v: e.erase_slot(v), ("0", "2")),
    Row("id_slot", lambda e, v: e.restore_slot(v, b"x"), ("0", "2")),
    Row("image", lambda e, v: e.restore_slot(0, v), ("bytes",)),
    Row(
        "tokens",
        lambda e, v: e.tokenizer.decode(v),
        ("list", "dict", "{1: 2}", "set", "empty", "bytes", "[True]"),
    ),
    Row("tokens", lambda e, v: e.tokenizer.token_bytes(v), ("0", "2", "True")),
    Row("tokens", lambda e, v: e.tokenizer.is_control(v), ("0", "2", "True")),
    Row("path", lambda _, v: runtime.load_tokenizer(v), ("text", "digit"), runtime.ConfigError),
    Row("config", lambda _, v: open_with(v), (), runtime.ConfigError),
    Row("progress", lambda _, v: open_with(CONFIG, v), ("None",), runtime.ConfigError),
)


async def open_with(config: object, progress: object = None) -> None:
    async with runtime.open_engine(config, progress):
        pass


@pytest.mark.parametrize("row", [*CONFIG_ROWS, *PARAMS_ROWS, *OTHER_ROWS], ids=lambda row: row.name)
async def test_a_value_of_the_wrong_kind_is_named(row: Row) -> None:
    async with runtime.open_engine(CONFIG) as engine:
        for name, value in VALUES.items():
            if name in row.may:
                continue
            with pytest.raises(row.error, match=re.escape(row.name)) as caught:
                given = row.give(engine, value)
                if inspect.isawaitable(given):
                    await given
                pytest.fail(f"{row.name} took {name}")
            assert len(str(caught.value)) < 400, name
        assert len(await read(engine, "a", GREEDY(max_tokens=2, ignore_eos=True))) == 2


def test_every_field_has_a_row() -> None:
    for kind, rows in ((runtime.EngineConfig, CONFIG_ROWS), (runtime.SamplingParams, PARAMS_ROWS)):
        assert {field.name for field in fields(kind)} == {row.name for row in rows}


@pytest.mark.parametrize("n", [1025, 10**5000], ids=["1025", "huge"])
async def test_more_answers_than_memory_holds_are_refused(n: int) -> None:
    async with runtime.open_engine(CONFIG) as engine:
        with pytest.raises(runtime.RequestError, match=r"'n'.*1 to 1024"):
            await read(engine, "a", n=n)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"moe_cache": (("misses", 4),)}, "moe_cache = .*: use pairs of a name .mode, misses"),
        ({"moe_cache": (("colour", "4"),)}, "moe_cache"),
        ({"tensor_split": (0, 0)}, "tensor_split"),
        ({"tensor_split": (1, float("inf"))}, "tensor_split"),
        ({"main_gpu": None}, "main_gpu = None: use a whole number of 0 to 1024"),
        ({"model": BUNDLED_MODEL.name.encode()}, "model = b.*: use the path of a GGUF file"),
    ],
    ids=str,
)
def test_settings_that_are_nearly_right(setting: dict[str, object], message: str) -> None:
    with pytest.raises(runtime.ConfigError, match=message):
        runtime.EngineConfig(**setting)


def test_a_value_is_shown_shortly() -> None:
    assert shown("x" * 10**6).startswith("'xxx") and len(shown("x" * 10**6)) <= 60
    assert shown([10**5000, 1]) == "[a huge number, 1]"
    assert len(shown([[list(range(100))] * 100] * 100)) < 400

    class Wrong:
        def __repr__(self) -> str:
            raise ValueError

    assert "Wrong" in shown(Wrong())
