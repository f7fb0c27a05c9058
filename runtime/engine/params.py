"""SamplingParams: how one request wants its tokens chosen, validated field by field.

Names and defaults are those of llama-server's request fields.  Values outside a hard limit are
refused with the field's name; values outside a soft limit are moved to it, because many clients
send such values to say "off".
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from runtime.checks import shown
from runtime.engine.sampling_chain import DEFAULT_SAMPLERS, SAMPLERS, sampler_name
from runtime.errors import RequestError

logger = logging.getLogger(__name__)

INT32_MAX = 2**31 - 1
RANDOM_SEED = 0xFFFFFFFF
DEFAULT_DRY_BASE = 1.75


@dataclass(frozen=True)
class Limit:
    """The numbers a field may hold: others are refused if `hard`, else moved to the nearer end."""

    kind: type
    low: float = -math.inf
    high: float = math.inf
    hard: bool = False

    def check(self, field: str, value: object) -> float | int:
        """`value` as this field's kind and inside its limits.  Raises: RequestError."""
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise RequestError(field, f"{shown(value)} is not a number")
        if isinstance(value, float):
            if math.isnan(value):
                raise RequestError(field, "NaN is not a usable number")
            if self.kind is int and not value.is_integer():
                raise RequestError(field, f"{shown(value)} is not a whole number")
        if self.low <= value <= self.high:
            return int(value) if self.kind is int else float(value)
        if self.hard:
            raise RequestError(field, f"{shown(value)} is outside {self.low:g} to {self.high:g}")
        nearer = min(max(value, self.low), self.high)
        return int(nearer) if self.kind is int else float(nearer)


_FINITE = Limit(float, -3.4e38, 3.4e38, hard=True)
_COUNT = Limit(int, 0, INT32_MAX, hard=True)
_UNIT = Limit(float, 0.0, 1.0)

LIMITS: dict[str, Limit] = {
    "temperature": Limit(float, 0.0, 3.4e38),
    "dynatemp_range": _FINITE,
    "dynatemp_exponent": _FINITE,
    "top_k": Limit(int, 0, INT32_MAX),
    "top_p": _UNIT,
    "min_p": _UNIT,
    "typical_p": _FINITE,
    "top_n_sigma": _FINITE,
    "xtc_probability": _UNIT,
    "xtc_threshold": _UNIT,
    "repeat_penalty": Limit(float, 1e-38, 3.4e38, hard=True),
    "repeat_last_n": _COUNT,
    "frequency_penalty": _FINITE,
    "presence_penalty": _FINITE,
    "dry_multiplier": Limit(float, 0.0, 3.4e38, hard=True),
    "dry_base": Limit(float, 0.0, 3.4e38, hard=True),
    "dry_allowed_length": _COUNT,
    "dry_penalty_last_n": _COUNT,
    "mirostat": Limit(int, 0, 2),
    "mirostat_tau": _FINITE,
    "mirostat_eta": _FINITE,
    "adaptive_target": Limit(float, -3.4e38, 1.0),
    "adaptive_decay": Limit(float, 0.0, 0.99, hard=True),
    "min_keep": _COUNT,
    "n_probs": _COUNT,
    "t_max_predict_ms": Limit(float, -1.0, 3.4e38, hard=True),
}

# `general.sampling.*` of a model file, and the field each one sets.
METADATA_FIELDS = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "xtc_probability": "xtc_probability",
    "xtc_threshold": "xtc_threshold",
    "penalty_last_n": "repeat_last_n",
    "penalty_repeat": "repeat_penalty",
    "mirostat": "mirostat",
    "mirostat_tau": "mirostat_tau",
    "mirostat_eta": "mirostat_eta",
    "sequence": "samplers",
}


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """One request's wishes.  `dataclasses.replace` gives a changed copy, validated again.

    max_tokens           tokens to generate at most; None (or -1): until the model ends or the
                         context is full
    stop                 strings that end the answer and are not part of it
    seed                 32 bits; -1: a random one, which `Sampler.seed` reports
    samplers             order of the chain, by names or letters; one not listed does not run, one
                         listed twice runs twice
    logit_bias           (token id or text, number) pairs added to the logits first; `False` forbids
                         the token
    ignore_eos           forbid every end token
    min_keep             candidates that top_p, min_p, typical_p and xtc leave at least
    logprobs             report the chosen token's log-probability
    n_probs              also report that many most likely tokens (implies `logprobs`)
    post_sampling_probs  report probabilities after the chain instead of raw log-probabilities
    t_max_predict_ms     end at the first new line after this time; <= 0: never
    The others are described in the table of samplers (runtime/engine/sampling_chain.py).

    Raises: RequestError naming the field.
    """

    max_tokens: int | None = None
    stop: Sequence[str] = ()
    seed: int = -1
    samplers: Sequence[str] | str = DEFAULT_SAMPLERS
    temperature: float = 0.8
    dynatemp_range: float = 0.0
    dynatemp_exponent: float = 1.0
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    typical_p: float = 1.0
    top_n_sigma: float = -1.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    repeat_penalty: float = 1.0
    repeat_last_n: int = 64
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    dry_multiplier: float = 0.0
    dry_base: float = DEFAULT_DRY_BASE
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = 64
    dry_sequence_breakers: Sequence[str] = ("\n", ":", '"', "*")
    mirostat: int = 0
    mirostat_tau: float = 5.0
    mirostat_eta: float = 0.1
    adaptive_target: float = -1.0
    adaptive_decay: float = 0.9
    logit_bias: Mapping[int | str, float | bool] | Sequence[tuple[int | str, float | bool]] = ()
    ignore_eos: bool = False
    min_keep: int = 0
    logprobs: bool = False
    n_probs: int = 0
    post_sampling_probs: bool = False
    t_max_predict_ms: float = 0.0

    def __post_init__(self) -> None:
        normalized: dict[str, Any] = {
            name: limit.check(name, getattr(self, name)) for name, limit in LIMITS.items()
        }
        if normalized["dry_base"] < 1.0:
            normalized["dry_base"] = DEFAULT_DRY_BASE
        normalized["max_tokens"] = _max_tokens(self.max_tokens)
        normalized["seed"] = _seed(self.seed)
        normalized["stop"] = _strings("stop", self.stop)
        normalized["dry_sequence_breakers"] = _strings(
            "dry_sequence_breakers", self.dry_sequence_breakers
        )
        normalized["samplers"] = _samplers(self.samplers)
        normalized["logit_bias"] = _logit_bias(self.logit_bias)
        for name in ("ignore_eos", "logprobs", "post_sampling_probs"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(name, f"{shown(getattr(self, name))} is not true or false")
        for name, value in normalized.items():
            object.__setattr__(self, name, value)

    @classmethod
    def greedy(cls, **fields: Any) -> SamplingParams:
        """The most likely token each time."""
        return cls(**{"temperature": 0.0, "samplers": ("temperature",), **fields})

    @property
    def biases(self) -> tuple[tuple[int | str, float], ...]:
        """`logit_bias` as normalized pairs."""
        return cast("tuple[tuple[int | str, float], ...]", self.logit_bias)

    @property
    def wants_logprobs(self) -> bool:
        return self.logprobs or self.n_probs > 0


def defaults_from_metadata(metadata: Mapping[str, object]) -> SamplingParams:
    """The defaults of a model: what its file says in `general.sampling.*`, else the usual ones.

    An unusable value in the file is logged and ignored: the model can be sampled without it.
    """
    params = SamplingParams()
    for key, field in METADATA_FIELDS.items():
        value = metadata.get(f"general.sampling.{key}")
        if value is None:
            continue
        if field == "samplers" and isinstance(value, str):
            value = value.split(";")
        try:
            params = SamplingParams(**{**params.__dict__, field: value})
        except RequestError as error:
            logger.warning("general.sampling.%s of the model is ignored: %s", key, error.message)
    return params


def _max_tokens(value: object) -> int | None:
    if value is None:
        return None
    tokens = int(Limit(int, -1, INT32_MAX, hard=True).check("max_tokens", value))
    return None if tokens == -1 else tokens


def _seed(value: object) -> int:
    """A seed of 32 bits or -1; longer ones lose their upper bits."""
    seed = int(Limit(int).check("seed", value)) & 0xFFFFFFFF
    return -1 if seed == RANDOM_SEED else seed


def _strings(field: str, value: object) -> tuple[str, ...]:
    if isinstance(value, str):
        value = (value,)
    if not isinstance(value, Iterable):
        raise RequestError(field, f"{shown(value)} is neither a string nor a list of strings")
    strings = tuple(value)
    for string in strings:
        if not isinstance(string, str):
            raise RequestError(field, f"{shown(string)} is not a string")
    return tuple(string for string in strings if string)


def _samplers(value: object) -> tuple[str, ...]:
    """Canonical names; unknown ones are logged and left out, as llama-server does (old clients send
    them).
    """
    if isinstance(value, str):
        letters = {row.letter: name for name, row in SAMPLERS.items()}
        names = [(letter, letters.get(letter)) for letter in value]
    else:
        names = [(name, sampler_name(name)) for name in _strings("samplers", value)]
    for given, name in names:
        if name is None:
            logger.warning("sampler %r is not known and does not run", given)
    return tuple(name for _, name in names if name is not None)


def _logit_bias(value: object) -> tuple[tuple[int | str, float], ...]:
    if isinstance(value, Mapping):
        value = tuple(value.items())
    if isinstance(value, str) or not isinstance(value, Iterable):
        wanted = "use pairs of a token (id or text) and a number"
        raise RequestError("logit_bias", f"{shown(value)}: {wanted}")
    return tuple(_bias_pair(pair) for pair in value)


def _bias_pair(pair: object) -> tuple[int | str, float]:
    if not isinstance(pair, Sequence) or isinstance(pair, str) or len(pair) != 2:
        raise RequestError("logit_bias", f"{shown(pair)} is not a pair of a token and a number")
    token, bias = pair
    if isinstance(token, bool) or not isinstance(token, int | str):
        raise RequestError("logit_bias", f"{shown(token)} is neither a token id nor a text")
    if bias is False or bias == -math.inf:
        return token, -math.inf
    return token, float(_FINITE.check("logit_bias", bias))
