"""The shape of answers: OpenAI's chat and text forms and llama-server's native one, whole and in
pieces.

A reply only renders; what happened is in the `Answer`s.  `pieces` makes the events of a stream from
one thing that has just happened, `last` those at its end, `whole` the body of a plain answer.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import Protocol

from runtime import Token
from server.answer_parts import AnswerParts, Json, MakeParser, PlainParser, finished
from server.build import BUILD_INFO
from server.generation import Answer, Event, PromptState
from server.requests import Wishes
from server.sampling import settings_echo

LOWEST_FLOAT = -3.4028234663852886e38  # JSON has no -inf

EMPTY: Json = {"content": ""}


class Reply(Protocol):
    """One form of answer; `done` ends its streams with `[DONE]`."""

    done: bool

    def pieces(self, event: Event) -> list[Json]: ...

    def last(self, answers: Sequence[Answer]) -> list[Json]: ...

    def whole(self, answers: Sequence[Answer]) -> object: ...


class ChatReply:
    """`chat.completion` and `chat.completion.chunk`."""

    done = True
    object_name = "chat.completion"
    id_prefix = "chatcmpl-"

    def __init__(self, model: str, wishes: Wishes, make_parser: MakeParser = PlainParser) -> None:
        """make_parser: a parser for each answer."""
        self._model = model
        self._wishes = wishes
        self._make_parser = make_parser
        self._parts: dict[int, AnswerParts] = {}
        self._id = self.id_prefix + secrets.token_hex(16)
        self._created = int(time.time())

    def pieces(self, event: Event) -> list[Json]:
        if isinstance(event, PromptState):
            # Clients read the first choice of every chunk.
            choices = self._opening(event.index) or [self._choice(event.index, EMPTY, None, None)]
            return [self._chunk(choices, prompt_progress=_progress(event))]
        token = event.last
        choices = self._opening(event.index) if event.n_items == 1 else []
        parts = self._parts.setdefault(event.index, AnswerParts(self._make_parser()))
        deltas = parts.push(token.text, is_last=token.finish_reason is not None)
        logprobs = None
        if self._wants_logprobs and token.id is not None:
            logprobs, deltas = self._logprobs([token]), deltas or [EMPTY]
        for delta in deltas:
            choices.append(self._choice(event.index, delta, None, logprobs))
            logprobs = None
        chunks = [self._chunk([choice]) for choice in choices]
        if self._wishes.timings_per_token and chunks and token.finish_reason is None:
            chunks[-1]["timings"] = event.timings.as_dict()
        if token.finish_reason is not None:
            reason = parts.finish_reason(token.finish_reason)
            final = self._choice(event.index, {}, reason, None)
            chunks.append(self._chunk([final], timings=event.timings.as_dict()))
        return chunks

    def last(self, answers: Sequence[Answer]) -> list[Json]:
        if not self._wishes.include_usage:
            return []
        return [
            self._chunk(
                [], usage=usage(answers, self._wishes.n), timings=answers[-1].timings.as_dict()
            )
        ]

    def whole(self, answers: Sequence[Answer]) -> Json:
        return self._envelope(
            self.object_name,
            [self._finished(answer) for answer in answers],
            usage=usage(answers, self._wishes.n),
            timings=answers[-1].timings.as_dict(),
        )

    @property
    def _wants_logprobs(self) -> bool:
        return self._wishes.params.wants_logprobs

    def _opening(self, index: int) -> list[Json]:
        delta = {"role": "assistant", "content": None}
        return [{"index": index, "delta": delta, "finish_reason": None}]

    def _choice(
        self, index: int, delta: Json, finish_reason: str | None, logprobs: Json | None
    ) -> Json:
        choice: Json = {"index": index, "delta": delta, "finish_reason": finish_reason}
        return choice if logprobs is None else choice | {"logprobs": logprobs}

    def _finished(self, answer: Answer) -> Json:
        parts = finished(self._make_parser(), answer.text)
        choice: Json = {
            "index": answer.index,
            "message": parts.message,
            "finish_reason": parts.finish_reason(answer.last.finish_reason),
        }
        return (
            choice | {"logprobs": self._logprobs(answer.tokens)} if self._wants_logprobs else choice
        )

    def _logprobs(self, tokens: Sequence[Token]) -> Json:
        post = self._wishes.params.post_sampling_probs
        return {"content": [probability(t, post=post) for t in tokens if t.id is not None]}

    def _chunk(self, choices: list[Json], **more: object) -> Json:
        return self._envelope(f"{self.object_name}.chunk", choices, **more)

    def _envelope(self, name: str, choices: list[Json], **more: object) -> Json:
        return {
            "choices": choices,
            "created": self._created,
            "id": self._id,
            "model": self._model,
            "system_fingerprint": BUILD_INFO,
            "object": name,
            **more,
        }


class TextReply(ChatReply):
    """`text_completion`, whole and as chunks; logprobs have the chat form, as in llama-server."""

    object_name = "text_completion"
    id_prefix = "cmpl-"

    def _opening(self, index: int) -> list[Json]:
        return []

    def _choice(
        self, index: int, delta: Json, finish_reason: str | None, logprobs: Json | None
    ) -> Json:
        return {
            "index": index,
            "text": delta.get("content", ""),
            "logprobs": logprobs,
            "finish_reason": finish_reason,
        }

    def _finished(self, answer: Answer) -> Json:
        logprobs = self._logprobs(answer.tokens) if self._wants_logprobs else None
        delta: Json = {"content": answer.text}
        return self._choice(answer.index, delta, answer.last.finish_reason, logprobs)

    def _chunk(self, choices: list[Json], **more: object) -> Json:
        return self._envelope(self.object_name, choices, **more)


class NativeReply:
    """llama-server's own form of `/completion`; prompts: what each prompt was, as text."""

    done = False

    def __init__(self, model: str, wishes: Wishes, prompts: Sequence[str]) -> None:
        self._model = model
        self._wishes = wishes
        self._prompts = prompts

    def pieces(self, event: Event) -> list[Json]:
        if isinstance(event, PromptState):
            return [
                {
                    "index": event.index,
                    "content": "",
                    "tokens": [],
                    "stop": False,
                    "id_slot": -1,
                    "tokens_predicted": 0,
                    "tokens_evaluated": event.total,
                    "prompt_progress": _progress(event),
                }
            ]
        token = event.last
        if token.finish_reason is not None:
            # Text that waited for a possible stop string comes with the last token.
            held = [self._piece(event, token)] if token.text else []
            return [*held, self._final(event, content="")]
        wants_piece = token.text or self._wishes.params.wants_logprobs or self._wishes.return_tokens
        return [self._piece(event, token)] if wants_piece else []

    def last(self, answers: Sequence[Answer]) -> list[Json]:
        return []

    def whole(self, answers: Sequence[Answer]) -> object:
        bodies = [self._final(answer, content=answer.text) for answer in answers]
        return bodies[0] if len(bodies) == 1 else bodies

    def _piece(self, answer: Answer, token: Token) -> Json:
        piece: Json = {
            "index": answer.index,
            "content": token.text,
            "tokens": [] if token.id is None else [token.id],
            "stop": False,
            "id_slot": token.slot,
            "tokens_predicted": token.n_generated,
            "tokens_evaluated": token.n_prompt,
        }
        if self._wishes.params.wants_logprobs and token.id is not None:
            piece["completion_probabilities"] = [self._probability(token)]
        if self._wishes.timings_per_token:
            piece["timings"] = answer.timings.as_dict()
        return piece

    def _final(self, answer: Answer, *, content: str) -> Json:
        last, wishes = answer.last, self._wishes
        body: Json = {
            "index": answer.index,
            "content": content,
            "tokens": answer.ids if wishes.return_tokens and not wishes.stream else [],
            "id_slot": last.slot,
            "stop": True,
            "model": self._model,
            "tokens_predicted": last.n_generated,
            "tokens_evaluated": last.n_prompt,
            "generation_settings": settings_echo(wishes.params, stream=wishes.stream),
            "prompt": self._prompts[answer.index // wishes.n],
            "has_new_line": "\n" in answer.text,
            "truncated": last.truncated,
            "stop_type": last.stop_type or "none",
            "stopping_word": last.stopping_word,
            "tokens_cached": last.n_prompt + last.n_generated,
            "timings": answer.timings.as_dict(),
        }
        if wishes.params.wants_logprobs and not wishes.stream:
            body["completion_probabilities"] = [
                self._probability(token) for token in answer.tokens if token.id is not None
            ]
        return picked(body, wishes.response_fields) if wishes.response_fields else body

    def _probability(self, token: Token) -> Json:
        return probability(token, post=self._wishes.params.post_sampling_probs)


def usage(answers: Sequence[Answer], n: int) -> Json:
    """Token counts over all answers; each prompt counts once, however many answers it got."""
    firsts = [answer.last for answer in answers[::n]]
    prompt = sum(token.n_prompt for token in firsts)
    completion = sum(answer.last.n_generated for answer in answers)
    return {
        "completion_tokens": completion,
        "prompt_tokens": prompt,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(token.n_cached for token in firsts)},
    }


def probability(token: Token, *, post: bool) -> Json:
    """A token with its likeliest rivals.

    post    probabilities after the chain, zero ones left out
    """
    key, top_key = ("prob", "top_probs") if post else ("logprob", "top_logprobs")
    rivals = [
        _candidate(rival.id, rival.bytes, rival.logprob, key)
        for rival in token.top_logprobs
        if not post or rival.logprob > 0
    ]
    logprob = LOWEST_FLOAT if token.logprob is None else token.logprob
    return _candidate(token.id, token.bytes, logprob, key) | {top_key: rivals}


def picked(body: Json, paths: Sequence[str]) -> Json:
    """The fields named by `paths`, by these names.

    `a/b` reaches into objects; missing ones are left out.
    """
    result: Json = {}
    for path in paths:
        value: object = body
        for name in path.split("/"):
            value = value.get(name) if isinstance(value, dict) else None
        if value is not None:
            result[path] = value
    return result


def _candidate(identifier: int | None, raw: bytes, logprob: float, key: str) -> Json:
    text = raw.decode("utf-8", "replace")
    return {"id": identifier, "token": text, "bytes": list(raw), key: max(logprob, LOWEST_FLOAT)}


def _progress(state: PromptState) -> Json:
    return {
        "total": state.total,
        "cache": state.cache,
        "processed": state.processed,
        "time_ms": state.time_ms,
    }
