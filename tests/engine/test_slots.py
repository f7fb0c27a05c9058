"""Saving a slot, and what comes back from the image."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import runtime
from runtime.engine.slot_image import SlotImage
from tests.support.fake_engine import fake, ids, read
from tests.support.tiny_models import TINY_MODELS

CONFIG = runtime.EngineConfig(device="fake", n_ctx=256)
PROMPT = list(range(100))


async def test_a_saved_slot_comes_back_in_another_engine() -> None:
    async with runtime.open_engine(CONFIG) as engine:
        first = await read(engine, PROMPT)
        image, _ = await engine.save_slot(first[-1].slot)
    async with runtime.open_engine(CONFIG) as engine:
        assert await engine.restore_slot(2, image) == 100 + 12 - 1
        again = await read(engine, PROMPT)
        assert again[0].n_cached == 99
        assert ids(again) == ids(first)


async def test_the_pages_themselves_come_back() -> None:
    """An image whose pages were exchanged must change the answer."""
    async with runtime.open_engine(CONFIG) as engine:
        first = await read(engine, PROMPT)
        data, n_saved = await engine.save_slot(0)
    image = SlotImage.from_bytes(data)
    assert n_saved == len(image.tokens)
    image.page_images.reverse()
    async with runtime.open_engine(CONFIG) as engine:
        await engine.restore_slot(0, image.to_bytes())
        assert ids(await read(engine, PROMPT)) != ids(first)


async def test_a_restored_slot_can_be_saved_and_erased() -> None:
    async with runtime.open_engine(CONFIG) as engine:
        await read(engine, PROMPT)
        image, n_saved = await engine.save_slot(0)
    async with runtime.open_engine(CONFIG) as engine:
        n_tokens = await engine.restore_slot(1, image)
        assert n_tokens == n_saved
        assert await engine.save_slot(1) == (image, n_saved)
        assert await engine.erase_slot(1) == n_tokens
        with pytest.raises(runtime.RequestError, match="nothing in the cache"):
            await engine.save_slot(1)
        assert (await read(engine, PROMPT))[0].n_cached == 0


async def test_restoring_what_is_here_loads_nothing() -> None:
    async with runtime.open_engine(CONFIG) as engine:
        await read(engine, PROMPT)
        image, _ = await engine.save_slot(0)
        before = engine.statistics()
        await engine.restore_slot(0, image)
        assert engine.statistics().n_pages_free == before.n_pages_free


@pytest.mark.parametrize("where", [0, 20, 200, -1])
async def test_a_damaged_image_is_refused(where: int) -> None:
    async with runtime.open_engine(CONFIG) as engine:
        await read(engine, PROMPT)
        image = bytearray((await engine.save_slot(0))[0])
        image[where] ^= 1
        with pytest.raises(runtime.RequestError, match="damaged"):
            await engine.restore_slot(0, bytes(image))
        with pytest.raises(runtime.RequestError, match="damaged"):
            await engine.restore_slot(0, b"")


async def test_an_image_of_another_model_is_refused() -> None:
    image = SlotImage("another model", 16, [1], [b"x"]).to_bytes()
    async with runtime.open_engine(CONFIG) as engine:
        with pytest.raises(runtime.RequestError, match="by a model that is not this one"):
            await engine.restore_slot(0, image)
        assert fake(engine).n_steps == 0


async def test_an_image_of_a_finetune_is_refused(tmp_path: Path) -> None:
    """Of the same name and sizes; and one of versions that did not look at the weights."""
    configs = []
    for name in ("plain", "trained"):
        model = TINY_MODELS["olmoe"]()
        model.metadata["general.name"] = "a model"
        if name == "trained":
            index = next(i for i, t in enumerate(model.tensors) if t.name == "blk.1.attn_v.weight")
            data = model.tensors[index].data
            model.tensors[index] = replace(model.tensors[index], data=data[256:] + data[:256])
        path = model.write(tmp_path / f"{name}.gguf")
        configs.append(runtime.EngineConfig(device="fake", model=path, n_ctx=256))
    async with runtime.open_engine(configs[0]) as engine:
        await read(engine, list(range(90)))
        data, n_tokens = await engine.save_slot(0)
        assert await engine.restore_slot(1, data) == n_tokens
    image = SlotImage.from_bytes(data)
    earlier = replace(image, model=image.model.rpartition(" ")[0])
    async with runtime.open_engine(configs[1]) as engine:
        for foreign in (image, earlier):
            with pytest.raises(runtime.RequestError, match="saved by a model"):
                await engine.restore_slot(1, foreign.to_bytes())


@pytest.mark.parametrize("slot", [-1, 4, True], ids=str)
async def test_a_slot_that_does_not_exist_is_a_request_error(slot: int) -> None:
    async with runtime.open_engine(CONFIG) as engine:
        with pytest.raises(runtime.RequestError, match="id_slot"):
            await engine.save_slot(slot)
