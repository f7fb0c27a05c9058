"""Where each token's time goes.  Usage: python examples/profile.py [MODEL.gguf]"""

from __future__ import annotations

import asyncio
import sys

import runtime


class Parts(runtime.Instrument):
    """Adds up the parts of every step that was timed."""

    def __init__(self) -> None:
        self.n_timed = 0
        self.seconds: dict[str, float] = {}

    def step_ended(self, record: runtime.StepRecord) -> None:
        if record.timed and not record.fresh and record.sort == "decode":
            self.n_timed += 1
            for part, seconds in record.parts.items():
                self.seconds[part] = self.seconds.get(part, 0.0) + seconds


async def main(model: str | None) -> None:
    """Generate some tokens and print what a token's time is made of."""
    parts = Parts()
    async with runtime.open_engine(runtime.EngineConfig(model=model)) as engine:
        engine.attach(parts)
        params = runtime.SamplingParams(temperature=0.0, max_tokens=256, ignore_eos=True)
        async for _ in engine.generate("Once upon a time", params):
            pass
    for part, seconds in parts.seconds.items():
        print(f"{part:10}{1e3 * seconds / parts.n_timed:8.3f} ms")


asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else None))
