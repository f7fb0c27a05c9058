"""Slots: the parallel places of an engine as the server shows, saves and restores them."""

from __future__ import annotations

from dataclasses import replace

from runtime.checks import shown
from runtime.config import ContextShape
from runtime.engine.answer import Answer
from runtime.engine.executor import Executor, StatefulExecutor
from runtime.engine.kv_cache import KVCache
from runtime.engine.slot_image import SlotImage
from runtime.engine.state_cache import Snapshot, StateCache
from runtime.engine.statistics import SlotStatistics, Statistics
from runtime.engine.step_loop import StepLoop
from runtime.errors import EngineBug, RequestError


class Slots:
    """What each slot last did.  The KV itself belongs to nobody: it lies in the prefix cache."""

    def __init__(self, steps: StepLoop, kv: KVCache, shape: ContextShape, model_key: str) -> None:
        """model_key: what the contents of pages depend on; an image of another one is refused."""
        self._steps = steps
        self._kv = kv
        self._shape = shape
        self._model_key = model_key
        self._restored: dict[int, tuple[Answer | None, list[int]]] = {}

    def statistics(self) -> Statistics:
        scheduler = self._steps.scheduler
        return Statistics(
            n_running=len(scheduler.running),
            n_waiting=len(scheduler.waiting),
            n_pages=self._kv.n_pages,
            n_pages_free=self._kv.n_free,
            n_pages_cached=self._kv.n_idle,
            counters=replace(self._steps.counters),
            slots=tuple(self._slot(slot) for slot in range(self._shape.n_parallel)),
        )

    async def save(self, slot: int) -> tuple[bytes, int]:
        """The image and its number of tokens.

        Raises: RequestError where the slot does not exist or holds nothing.
        """
        tokens = self._tokens(slot)

        async def copy_out() -> SlotImage:
            pages, n_tokens = self._kv.lookup(tokens)
            snapshot = self._snapshot(tokens, n_tokens)
            if snapshot is not None:
                n_tokens = snapshot.n_tokens
                pages = pages[: self._kv.pages_for(n_tokens)]
            if not n_tokens or (self._states is not None and snapshot is None):
                raise RequestError("id_slot", f"slot {slot} has nothing in the cache")
            executor = self._steps.executor

            def copy() -> SlotImage:
                images = [executor.save_pages([page]) for page in pages]
                state = b""
                if snapshot is not None:
                    state = _stateful(executor).save_state(snapshot.slot)
                page_tokens = self._kv.page_tokens
                return SlotImage(self._model_key, page_tokens, tokens[:n_tokens], images, state)

            return await self._steps.off_loop(copy)

        image = await self._steps.between_steps.result_of(copy_out)
        return await self._steps.off_loop(image.to_bytes), len(image.tokens)

    async def restore(self, slot: int, data: bytes) -> int:
        """Raises: RequestError where the image is not one of this model, or does not fit."""
        self._tokens(slot)
        image = await self._steps.off_loop(lambda: SlotImage.from_bytes(data))
        if (image.model, image.page_tokens) != (self._model_key, self._kv.page_tokens):
            raise RequestError(
                "filename",
                f"saved by a model that is not this one ({self._model_key}), or by an earlier "
                f"version of this program: {image.model}",
            )

        async def copy_in() -> None:
            restored = self._kv.restore(image.tokens)
            if restored is None:
                raise RequestError("filename", f"{len(image.tokens)} tokens do not fit now")
            executor = self._steps.executor
            chain = self._kv.chain_of(image.tokens)
            target = self._states.restore(chain, image.tokens) if self._states else None

            def load() -> None:
                for page, index in zip(*restored, strict=True):
                    executor.load_pages([page], image.page_images[index])
                if target is not None:
                    _stateful(executor).load_state(target, image.state)

            await self._steps.off_loop(load)

        await self._steps.between_steps.result_of(copy_in)
        self._restored[slot] = (self._steps.slots.get(slot), image.tokens)
        return len(image.tokens)

    async def erase(self, slot: int) -> int:
        """Raises: RequestError where the slot does not exist."""
        tokens = self._tokens(slot)

        async def forget() -> int:
            if self._states is not None:
                self._states.forget(tokens, self._kv.chain_of(tokens))
            return self._kv.forget(tokens)

        return await self._steps.between_steps.result_of(forget)

    @property
    def _states(self) -> StateCache | None:
        return self._steps.scheduler.states

    def _snapshot(self, tokens: list[int], n_tokens: int) -> Snapshot | None:
        """The latest state within the first `n_tokens`, where the model has states."""
        if self._states is None:
            return None
        return next(self._states.find(tokens, self._kv.chain_of(tokens), n_tokens), None)

    def _tokens(self, slot: int) -> list[int]:
        """What the slot last held.  Raises: RequestError."""
        if type(slot) is not int or not 0 <= slot < self._shape.n_parallel:
            raise RequestError("id_slot", f"{shown(slot)}: use 0 to {self._shape.n_parallel - 1}")
        answer = self._steps.slots.get(slot)
        if slot in self._restored:
            before, tokens = self._restored[slot]
            if before is answer:
                return tokens
            del self._restored[slot]  # another sequence has used the slot since
        return [] if answer is None else list(answer.sequence.tokens)

    def _slot(self, slot: int) -> SlotStatistics:
        n_ctx = self._shape.n_ctx_sequence
        answer = self._steps.slots.get(slot)
        if answer is None:
            return SlotStatistics(slot, "EMPTY", n_ctx)
        sequence = answer.sequence
        return SlotStatistics(
            id=slot,
            state=sequence.state.name,
            n_ctx=n_ctx,
            is_processing=sequence in self._steps.scheduler.running and sequence.slot == slot,
            request=sequence.arrival,
            n_tokens=len(sequence.tokens),
            n_prompt=sequence.n_prompt,
            n_cached=sequence.n_cached,
            n_processed=max(min(sequence.n_computed, sequence.n_prompt) - sequence.n_cached, 0),
            n_generated=sequence.n_generated,
            n_remain=answer.n_remain,
            has_new_line=answer.has_new_line,
            params=answer.params,
        )


def _stateful(executor: Executor) -> StatefulExecutor:
    """Raises: EngineBug where an executor has state slots and cannot save them."""
    if not isinstance(executor, StatefulExecutor):
        raise EngineBug(f"{type(executor).__name__} has states and cannot save or load them")
    return executor
