"""Token: what the caller of `Engine.generate` receives, one item for each generated token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

FinishReason = Literal["stop", "length"]
StopType = Literal["eos", "word", "limit"]


@dataclass(frozen=True, slots=True)
class TokenProbability:
    """A candidate for one place.

    logprob   its raw log-probability (natural, <= 0); with `post_sampling_probs` not a logarithm
              but the plain probability after the chain (0 to 1)
    """

    id: int
    bytes: bytes
    logprob: float


@dataclass(frozen=True, slots=True)
class PromptProgress:
    """`n_processed` of a prompt's `n_total` tokens are read, `n_cached` of them were reused."""

    index: int
    n_total: int
    n_cached: int
    n_processed: int
    ms: float


@dataclass(frozen=True, slots=True)
class Timings:
    """Counts and times of one finished sequence, under llama-server's names.

    cache_n       prompt tokens whose KV was reused
    prompt_n      prompt tokens that were computed; prompt_ms: until the first token, without the
                  time in the queue
    predicted_n   generated tokens, the end token too; predicted_ms: from the first to the last
    expert_hit_rate, expert_miss_bytes   of the routed experts of all its tokens: the share that the
                  GPU held, and the bytes of the others, read anew for every token; None where
                  experts do not move, or of a sequence that goes on
    """

    cache_n: int
    prompt_n: int
    prompt_ms: float
    predicted_n: int
    predicted_ms: float
    expert_hit_rate: float | None = None
    expert_miss_bytes: float | None = None

    def as_dict(self) -> dict[str, float]:
        """All of llama-server's `timings` fields, and ours where they say something."""
        own = {
            "expert_hit_rate": self.expert_hit_rate,
            "expert_miss_bytes": self.expert_miss_bytes,
        }
        return {
            "cache_n": self.cache_n,
            "prompt_n": self.prompt_n,
            "prompt_ms": self.prompt_ms,
            "prompt_per_token_ms": _ratio(self.prompt_ms, self.prompt_n),
            "prompt_per_second": _ratio(1e3 * self.prompt_n, self.prompt_ms),
            "predicted_n": self.predicted_n,
            "predicted_ms": self.predicted_ms,
            "predicted_per_token_ms": _ratio(self.predicted_ms, self.predicted_n),
            "predicted_per_second": _ratio(1e3 * self.predicted_n, self.predicted_ms),
            **{name: value for name, value in own.items() if value is not None},
        }


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Token:
    """One generated token, and the text that became certain with it.

    index          which completion of the request it belongs to (0 .. n - 1)
    id             the token; None only in the single item of a request with max_tokens = 0
    text           complete characters to show now.  What may become part of a stop string waits
                   for a later item, so the joined texts are the answer.  "" without a tokenizer
    bytes          the token's own bytes, whole characters or not
    logprob        of this token, where asked for: a log-probability, or with `post_sampling_probs`
                   a plain probability (see TokenProbability)
    top_logprobs   the likeliest tokens of this place, best first
    slot           the place among the engine's parallel sequences that computed it
    n_prompt       tokens of the prompt; n_cached: how many of them were reused
    n_generated    tokens of this completion so far, this one included

    Only on the last item of a completion:
    finish_reason  "stop" (end token or stop string) or "length" (max_tokens or context)
    stop_type      "eos", "word" or "limit";  stopping_word: the stop string, else ""
    truncated      the context was full
    timings
    """

    index: int
    id: int | None
    text: str
    bytes: bytes
    slot: int
    n_prompt: int
    n_cached: int
    n_generated: int
    logprob: float | None = None
    top_logprobs: tuple[TokenProbability, ...] = ()
    finish_reason: FinishReason | None = None
    stop_type: StopType | None = None
    stopping_word: str = ""
    truncated: bool = False
    timings: Timings | None = None
