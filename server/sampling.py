"""Request fields -> SamplingParams, under llama-server's names and their OpenAI synonyms.

Types are checked here, so that the message can name the field as the client spelled it; ranges are
the business of `SamplingParams`.
"""

from __future__ import annotations

import dataclasses

from runtime import SamplingParams
from runtime.errors import RequestError
from server.fields import Fields

MAX_STOPS = 256
MAX_STOP_CHARACTERS = 4096
MAX_BIASES = 32_768
MAX_PROBABILITIES = 256

NUMBERS = (
    "temperature", "dynatemp_range", "dynatemp_exponent", "top_p", "min_p", "top_n_sigma",
    "xtc_probability", "xtc_threshold", "repeat_penalty", "frequency_penalty", "presence_penalty",
    "dry_multiplier", "dry_base", "mirostat_tau", "mirostat_eta", "adaptive_target",
    "adaptive_decay", "t_max_predict_ms",
)  # fmt: skip
INTEGERS = (
    "top_k", "repeat_last_n", "dry_allowed_length", "dry_penalty_last_n", "mirostat", "min_keep"
)  # fmt: skip
FLAGS = ("ignore_eos", "post_sampling_probs")
_BIG = 2**63


def sampling_params(fields: Fields, defaults: SamplingParams) -> SamplingParams:
    """`defaults` with what the request says.  Raises: RequestError naming the field."""
    changes: dict[str, object] = {}
    for name in NUMBERS:
        changes[name] = fields.number(name)
    changes["typical_p"] = fields.number("typical_p", "typ_p")
    for name in INTEGERS:
        changes[name] = fields.integer(name, low=-_BIG, high=_BIG, clamp=True)
    for name in FLAGS:
        changes[name] = fields.flag(name, getattr(defaults, name))
    changes["max_tokens"] = fields.integer(
        "max_completion_tokens", "max_tokens", "n_predict", low=-1, high=2**31 - 1
    )
    changes["seed"] = fields.integer("seed", low=-_BIG, high=2 * _BIG)
    changes["stop"] = stop_strings(fields) or None
    changes["samplers"] = _samplers(fields)
    changes["dry_sequence_breakers"] = _strings(fields, "dry_sequence_breakers")
    changes["logit_bias"] = _logit_bias(fields)
    given = {name: value for name, value in changes.items() if value is not None}
    return dataclasses.replace(defaults, **given)  # type: ignore[arg-type]


def stop_strings(fields: Fields) -> tuple[str, ...]:
    """`stop`: a string or a list of them; empty strings never match and are left out."""
    value = fields.raw("stop")
    if isinstance(value, str):
        value = [value]
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        raise fields.wrong("stop", "must be a string or a list of strings", value)
    if len(value) > MAX_STOPS or any(len(text) > MAX_STOP_CHARACTERS for text in value):
        raise RequestError(
            "stop", f"at most {MAX_STOPS} strings of {MAX_STOP_CHARACTERS} characters are accepted"
        )
    return tuple(text for text in value if text)


def with_probabilities(params: SamplingParams, n_probs: int | None) -> SamplingParams:
    """`params` that also report the `n_probs` likeliest tokens; 0 or None: as they are."""
    return dataclasses.replace(params, n_probs=n_probs) if n_probs else params


def n_probs(fields: Fields, *names: str) -> int | None:
    return fields.integer(*names, low=0, high=MAX_PROBABILITIES)


def settings_echo(params: SamplingParams, *, stream: bool) -> dict[str, object]:
    """`generation_settings` as llama-server spells them."""
    echo = {item.name: getattr(params, item.name) for item in dataclasses.fields(params)}
    n_predict = -1 if params.max_tokens is None else params.max_tokens
    echo["typ_p"] = echo["typical_p"]
    echo["logit_bias"] = [
        {"token": token, "bias": bias} for token, bias in dict(params.logit_bias).items()
    ]
    return echo | {"n_predict": n_predict, "max_tokens": n_predict, "stream": stream}


def _samplers(fields: Fields) -> str | tuple[str, ...] | None:
    value = fields.raw("samplers")
    if value is None or (isinstance(value, str) and len(value) <= 256):
        return value
    return _strings(fields, "samplers")


def _strings(fields: Fields, name: str) -> tuple[str, ...] | None:
    items = fields.items(name, limit=MAX_STOPS)
    if items is None:
        return None
    if any(not isinstance(item, str) or len(item) > MAX_STOP_CHARACTERS for item in items):
        raise RequestError(
            name, f"must be a list of strings of at most {MAX_STOP_CHARACTERS} characters"
        )
    return tuple(str(item) for item in items)


def _logit_bias(fields: Fields) -> tuple[tuple[int | str, float | bool], ...] | None:
    """`[[token, bias], ...]` or `{"token": bias}`.

    A token is an id or a text; a bias of `false` forbids it.
    """
    value = fields.raw("logit_bias")
    if value is None:
        return None
    if isinstance(value, dict):
        pairs: list[object] = [[_token_key(key), bias] for key, bias in value.items()]
    elif isinstance(value, list):
        pairs = value
    else:
        raise fields.wrong("logit_bias", "must be a list of pairs or an object", value)
    if len(pairs) > MAX_BIASES:
        raise RequestError("logit_bias", f"at most {MAX_BIASES} entries are accepted")
    return tuple(_bias_pair(pair) for pair in pairs)


def _token_key(key: str) -> int | str:
    return int(key) if key.isascii() and key.isdigit() and len(key) <= 18 else key


def _bias_pair(pair: object) -> tuple[int | str, float | bool]:
    if not isinstance(pair, list) or len(pair) != 2:
        raise RequestError("logit_bias", "each entry must be a pair of a token and a number")
    entry = Fields({"token": pair[0], "bias": pair[1]}, "logit_bias")
    token: int | str | None
    token = pair[0] if isinstance(pair[0], str) else entry.integer("token", low=-_BIG, high=_BIG)
    bias = False if pair[1] is False else entry.number("bias")
    if token is None or bias is None:
        raise RequestError("logit_bias", "a token and its bias must not be null")
    return token, bias
