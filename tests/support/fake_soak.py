"""The soak of `python -m bench soak` with GPU kernels that the interpreter runs on the CPU.

    python -m tests.support.fake_soak --minutes 120 --out result.json

A small hybrid model: two layers of eight experts, of which the GPU holds some. All of it is the
shipped program but the driver, which is `tests.support.fake_driver`, and the exchange's test at the
start, which takes minutes there.
"""

from __future__ import annotations

import sys
import time
import warnings
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest import mock

from bench import slot_check, soak
from runtime.cuda.driver import initialized
from runtime.experts.self_test import SelfTest
from tests.support.block_models import BLOCK_MODELS
from tests.support.fake_driver import FakeDriver

GPU_BYTES = 1 << 30
SMALL = [
    *("--device", "cuda", "--device-in-ram", "--streams", "2", "--cache", "3", "--phase", "60"),
    *("--longest", "6", "--answer", "6", "--a-topic", "2"),
]


def main(argv: list[str]) -> int:
    """As `bench.soak.main`, with a model of its own and a GPU that is not there."""
    warnings.simplefilter("ignore", RuntimeWarning)  # of kernels' arithmetic in the interpreter
    fake = FakeDriver(memory_bytes=GPU_BYTES)
    fake.host = lambda: time.sleep(0)
    driver = initialized(fake, "13.4.4")
    with (
        TemporaryDirectory() as directory,
        mock.patch("runtime.cuda.driver.open_driver", lambda: driver),
        mock.patch("runtime.engine.gpu.opening.open_driver", lambda: driver),
        mock.patch.object(slot_check, "open_driver", lambda: driver),
        mock.patch("runtime.experts.self_test.self_test", lambda *given: SelfTest(1, 1.0)),
    ):
        path = BLOCK_MODELS["qwen3moe"]("Q8_0", 2).write(Path(directory) / "model.gguf")
        return soak.main([str(path), *SMALL, *argv])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
