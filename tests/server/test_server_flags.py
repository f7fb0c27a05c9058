"""Flags, environment, settings, and what the start says about them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from runtime import ConfigError
from runtime.commands.serve import take_over
from server import cli
from server.download import choose_files
from server.flag_table import FLAGS
from server.flags import Given, completion_script, parse_flags
from server.settings import engine_config, server_settings
from tests.support.measure import seconds_of_children


def parse(*arguments: str, **environment: str) -> dict[str, Given]:
    return parse_flags(arguments, FLAGS, environment.get)


def test_every_spelling_is_unique_and_every_flag_has_a_long_one() -> None:
    names = [name for flag in FLAGS for name in (*flag.names, *flag.off)]
    assert len(names) == len(set(names))
    keys = [flag.key for flag in FLAGS]
    assert len(keys) == len(set(keys))


def test_command_line_wins_over_the_environment() -> None:
    given = parse("-c", "100", LLAMA_ARG_CTX_SIZE="50", LLAMA_ARG_PORT="99")
    assert given["ctx_size"].value == 100
    assert given["port"].value == 99
    assert given["port"].source == "LLAMA_ARG_PORT"


def test_forms() -> None:
    given = parse("--ctx-size=5", "--no-slots", "-ot", "a=CPU", "-ot", "b=CPU", "-l", "5-1.5")
    assert given["ctx_size"].value == 5
    assert given["slots"].value is False
    assert given["override_tensor"].value == ("a=CPU", "b=CPU")
    assert parse(LLAMA_ARG_ENDPOINT_METRICS="1")["metrics"].value is True
    assert parse(LLAMA_ARG_ENDPOINT_SLOTS="off")["slots"].value is False


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--no-such-flag"], "--no-such-flag"), (["-zz"], "-zz"), (["stray"], "stray"),
        (["--ctx-siz", "5"], "did you mean --ctx-size"), (["-c"], "-c needs a value"),
        (["-c", "many"], "whole number"), (["--temp", "hot"], "number"), (["-fa", "maybe"],
        "on, off"),
        (["--metrics=1"], "switch"), (["--port", "70000"], "port"), (["--timeout", "0"], "timeout"),
        (["--api-prefix", "x"], "api-prefix"), (["--slot-save-path", "/no/such"], "slot-save-path"),
        (["--api-key-file", "/no/such"], "api-key-file"), (["--api-key", ","], "no key"),
        (["--chat-template-kwargs", "{"], "JSON"),
        (["--chat-template-kwargs", '{"messages": []}'], "'messages' cannot be set"),
        (["-m", ""], "-m: the file's name is empty"),
        (["--top-n-sigma", "nan"], "top_n_sigma"), (["-l", "x"], "logit-bias"), (["-ctk", "q3"],
        "cache_type_k"),
        (["-np", "0"], "n_parallel"), (["--repeat-penalty", "0"], "repeat_penalty"),
        (["--grammar", "x"], "--grammar is not supported"), (["-mu", "http://x"],
        "of a .gguf file"),
        (["-hf", "nonsense"], "USER/REPO"),
    ],
)  # fmt: skip
def test_bad_settings_name_the_flag(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error


def test_an_early_interrupt_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(given: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "serve", interrupted)
    assert cli.main([]) == 130


def test_bad_environment_names_the_variable() -> None:
    with pytest.raises(ConfigError, match="LLAMA_ARG_PORT"):
        parse(LLAMA_ARG_PORT="x")
    with pytest.raises(ConfigError, match="LLAMA_ARG_ENDPOINT_SLOTS"):
        parse(LLAMA_ARG_ENDPOINT_SLOTS="perhaps")


def test_unknown_variables_of_the_expert_cache_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WINDOW", "PROFILE", "MARGIN_MB", "WAIT", "WINDWO"):
        monkeypatch.setenv(f"LLAMA_MOE_CACHE_{name}", "1")
    given = parse()
    lines = cli.explain(given, engine_config(given, None), server_settings(given))
    told = [line.split()[1] for line in lines if line.startswith("note: LLAMA_MOE_CACHE")]
    assert told == ["LLAMA_MOE_CACHE_WAIT", "LLAMA_MOE_CACHE_WINDWO"]


def test_settings(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("# mine\nk2\n\n k3 \n")
    words = (
        "-a one,two --api-key k1 -c 64 -np 2 -t 3 -ub 32 -b 16 -ctk q8_0 --temp 0 -n 7 "
        f"--api-key-file {keys} --samplers top_k;temperature -l 15+1 -r STOP "
        "--reasoning off --no-prefill-assistant --no-cache-prompt --ctx-checkpoints 5 "
        "--cors-origins http://a.b"
    )
    given = parse(*words.split())
    settings = server_settings(given)
    assert settings.aliases == ("one", "two")
    assert settings.api_keys == ("k1", "k2", "k3")
    assert settings.cors_origins == ("http://a.b",)
    assert settings.sampling == {
        "temperature": 0.0, "max_tokens": 7, "samplers": ("top_k", "temperature"),
        "logit_bias": ((15, 1.0),), "stop": ("STOP",),
    }  # fmt: skip
    assert settings.chat_template_kwargs == {"enable_thinking": False}
    assert settings.prefill_assistant is False
    config = engine_config(given, None)
    assert (config.n_ctx, config.n_parallel, config.n_threads, config.n_batch) == (64, 2, 3, 16)
    assert (config.cache_type_k, config.prefix_cache) == ("q8_0", False)
    assert config.n_snapshots == 5
    assert (config.device, config.vram_limit, config.moe_expert_cache) == ("auto", None, -1)
    gpu = engine_config(
        parse("-dev", "CUDA0", "--vram-limit", "7.5", "--moe-expert-cache", "8"), None
    )
    assert (gpu.device, gpu.vram_limit, gpu.moe_expert_cache) == ("cuda", 7.5, 8)
    assert (gpu.split_mode, gpu.main_gpu, gpu.tensor_split) == ("auto", 0, None)
    split = engine_config(parse("-sm", "none", "-mg", "1", "-ts", "3,1/0"), None)
    assert (split.split_mode, split.main_gpu, split.tensor_split) == ("none", 1, (3.0, 1.0, 0.0))
    assert engine_config(parse("--device-kind", "none"), None).device == "cpu"
    plain = engine_config(parse("-c", "0", "-t", "-1"), None)
    assert (plain.n_ctx, plain.n_threads, plain.n_batch) == (None, None, None)


def test_the_seeds_names_reach_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    given = parse("--moe", "Policy=lru,swap-lead=2,RECENT=32", "--moe-cache-window", "16")
    config = engine_config(given, None)
    assert dict(config.moe_cache) == {"policy": "lru", "margin": "2", "window": "16"}
    assert config.vram_reserve is None
    monkeypatch.setenv("LLAMA_MOE_CACHE_MARGIN_MB", "384")
    assert engine_config(parse(), None).vram_reserve == 384
    assert engine_config(parse("-fitt", "64"), None).vram_reserve == 64
    for words in (("--moe", "slots"), ("--moe", "nothing=1"), ("--moe", "window=")):
        with pytest.raises(ConfigError, match="--moe"):
            engine_config(parse(*words), None)
    monkeypatch.setenv("LLAMA_MOE_CACHE_MARGIN_MB", "much")
    with pytest.raises(ConfigError, match="MARGIN_MB"):
        engine_config(parse(), None)


@pytest.mark.parametrize(
    ("words", "mode"),
    [
        ([], "pin"),
        (["-lm", "mmap"], "mmap"),
        (["--load-mode", "mmap+mlock"], "pin"),
        (["--mmap"], "mmap"),
        (["--no-mmap"], "pin"),
        (["--mlock"], "pin"),
        (["--mmap", "--mlock"], "pin"),
        (["--mlock", "-lm", "mmap"], "mmap"),
    ],
)
def test_how_the_model_gets_into_memory(words: list[str], mode: str) -> None:
    assert engine_config(parse(*words), None).load_mode == mode


def test_the_start_says_what_has_no_effect(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMA_MOE_CACHE_STATS", "1")
    monkeypatch.setenv("LLAMA_MOE_CACHE_POLICY", "lru")
    monkeypatch.setenv("GGML_SCHED_PROF", "1")
    monkeypatch.setenv("LLAMA_ARG_CTX_SIZ", "64")
    monkeypatch.setenv("LLAMA_ARG_CTX_SIZE", "64")
    given = parse("-ngl", "99", "--prefetch-experts-slots", "3", "-fa", "on", "-c", "64")
    lines = cli.explain(given, engine_config(given, None), server_settings(given))
    text = "\n".join(lines)
    for name in (
        "-ngl", "--prefetch-experts-slots", "-fa", "LLAMA_MOE_CACHE_STATS", "LLAMA_ARG_CTX_SIZ"
    ):  # fmt: skip
        assert f"note: {name} has no effect: " in text
    assert "LLAMA_ARG_CTX_SIZE " not in text and "LLAMA_MOE_CACHE_POLICY" not in text
    assert "GGML_SCHED_PROF" not in text  # it works
    assert "DEMONSTRATION" in text
    assert "context: 64, set by -c" in text


def test_help_names_every_flag_quickly() -> None:
    command = [sys.executable, "-m", "runtime.server", "--help"]
    begun = seconds_of_children()
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert seconds_of_children() - begun < 0.5
    for flag in FLAGS:
        assert all(name in done.stdout for name in (*flag.names, *flag.off))


def test_help_and_bad_flags_load_neither_aiohttp_nor_numpy() -> None:
    code = (
        "import sys; from server.cli import main; main(['--help']); main(['--nope']);"
        "sys.exit(any(name in sys.modules for name in ('aiohttp', 'numpy', 'numba', 'msgspec')))"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    assert (
        subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True
        ).returncode
        == 0
    )


def test_information_flags(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("hotexpert-")
    assert cli.main(["--list-devices"]) == 0
    assert "CPU" in capsys.readouterr().out
    assert cli.main(["--completion-bash"]) == 0
    script = capsys.readouterr().out
    assert "--moe-expert-cache" in script
    assert script.endswith(" hotexpert\n")
    assert cli.main(["--help"]) == 0
    assert capsys.readouterr().out.startswith("usage: python -m runtime.server ")
    assert take_over(["--help"]) == 0
    assert capsys.readouterr().out.startswith("usage: hotexpert serve ")


def test_the_completion_knows_the_flags_of_serve() -> None:
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("there is no bash here")
    script = completion_script(FLAGS)
    for words, wanted in (("hotexpert serve --ctx-s", "--ctx-size"), ("hotexpert run --ctx-s", "")):
        ask = f"{script}COMP_WORDS=({words}); COMP_CWORD=2; _hotexpert; printf '%s\\n' $COMPREPLY"
        done = subprocess.run([bash, "-c", ask], capture_output=True, text=True, check=True)
        assert done.stdout.strip() == wanted


@pytest.mark.parametrize(
    ("quant", "wanted", "expected"),
    [
        (None, None, ["a-Q4_K_M.gguf"]), ("q8_0", None, ["a-Q8_0.gguf"]),
        (None, "a-IQ1.gguf", ["a-IQ1.gguf"]),
        ("Q6_K", None, ["x/a-Q6_K-00001-of-00002.gguf", "x/a-Q6_K-00002-of-00002.gguf"]),
    ],
)  # fmt: skip
def test_which_files_of_a_repository(
    quant: str | None, wanted: str | None, expected: list[str]
) -> None:
    names = [
        "README.md", "a-IQ1.gguf", "a-Q8_0.gguf", "a-Q4_K_M.gguf", "mmproj-Q4_K_M.gguf",
        "x/a-Q6_K-00002-of-00002.gguf", "x/a-Q6_K-00001-of-00002.gguf",
    ]  # fmt: skip
    assert choose_files(names, quant, wanted) == expected
    with pytest.raises(ConfigError, match="a-Q8_0"):
        choose_files(names, "Q9", None)
