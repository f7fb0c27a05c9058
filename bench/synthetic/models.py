"""The models whose shapes can be written, by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from bench.synthetic.latent_models import DeepSeek2, Glm5Next
from bench.synthetic.plain_models import Glm4Moe, GptOss, Mimo2, PlainMoe
from bench.synthetic.recurrent_models import Qwen4Exp, Qwen35
from bench.synthetic.sketch import Sketch


class Shape(Protocol):
    """The numbers of a model."""

    @property
    def architecture(self) -> str:
        """As GGUF files name it."""

    @property
    def n_layers(self) -> int:
        """Of the real model."""

    def describe(self, sketch: Sketch) -> None:
        """Give the sketch the model's keys and tensors."""


MODELS: Mapping[str, Shape] = {
    "olmoe": PlainMoe("olmoe", 2048, 16, 16, 16, 128, 1024, 64, 8, 50304, 1e4, 1e-5, True),
    "qwen3-30b-a3b": PlainMoe(
        "qwen3moe", 2048, 48, 32, 4, 128, 768, 128, 8, 151936, 1e6, 1e-6, False
    ),
    "qwen3-235b-a22b": PlainMoe(
        "qwen3moe", 4096, 94, 64, 4, 128, 1536, 128, 8, 151936, 1e6, 1e-6, False
    ),
    "gpt-oss-20b": GptOss(n_layers=24, n_expert=32),
    "gpt-oss-120b": GptOss(n_layers=36, n_expert=128),
    "glm-4.5-air": Glm4Moe(),
    "mimo-v2.6-flash": Mimo2(),
    "deepseek-v2-lite": DeepSeek2(
        27, 2048, 16, 0, 128, 128, 1408, 10944, 64, 6, 2, 102400, False, 1.0, yarn_factor=40.0
    ),
    "glm-4.7-flash": DeepSeek2(
        47, 2048, 20, 768, 192, 256, 1536, 10240, 64, 4, 1, 154880, True, 1.8, 1e6
    ),
    "glm-5.3-flash": Glm5Next(),
    "qwen3.8-27b": Qwen35(),
    "qwen3.8-flash-next": Qwen4Exp(),
}
