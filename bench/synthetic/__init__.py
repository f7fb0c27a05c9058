"""Write a GGUF file of a real model's shape with random weights, as fast as the disk takes it.

    python -m bench synthetic --model qwen3-30b-a3b --layers 12 /tmp/model.gguf

Names, shapes, formats and keys are those of real files; weights are blocks drawn from small pools,
with a spread that keeps activations finite. The model says nothing, its speed is that of the real
one. Router rows are scaled by exp(skew * normal), so some experts are used more than others; 0
makes them alike. An n-gram table of the real size is a hole in the file (zeros), a smaller one not.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from bench.synthetic.gguf_file import write_file
from bench.synthetic.models import MODELS, Shape
from bench.synthetic.recurrent_models import Qwen4Exp
from bench.synthetic.sketch import Sketch

__all__ = ["MIXED", "MODELS", "Shape", "Sketch", "main", "sketch_of", "write_model"]

MIXED = "mixed"


def main(argv: list[str]) -> int:
    """Write what the arguments ask for."""
    parser = argparse.ArgumentParser(prog="python -m bench synthetic", description=__doc__)
    parser.add_argument("--model", choices=MODELS, default="olmoe")
    parser.add_argument("--layers", type=int, help="instead of the model's own number")
    parser.add_argument("--skew", type=float, default=0.5, help="of the experts' use, default 0.5")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--format", default=MIXED, help="mixed: as real files mix; else one format")
    parser.add_argument("--table-rows", type=int, help="of an n-gram table; default its own number")
    parser.add_argument("out", type=Path)
    options = parser.parse_args(argv)
    shape = MODELS[options.model]
    if options.table_rows and isinstance(shape, Qwen4Exp):
        shape = replace(shape, n_table_rows=options.table_rows)
    n_layers = options.layers or shape.n_layers
    write_model(options.out, shape, n_layers, options.skew, options.seed, options.format)
    print(f"wrote {options.out}: {options.out.stat().st_size / 1e9:.2f} GB")
    return 0


def write_model(
    path: Path, shape: Shape, n_layers: int, skew: float, seed: int = 1, fmt: str = MIXED
) -> None:
    """Write the file. The same arguments give the same bytes.

    Raises: ValueError for formats that cannot be drawn; OSError.
    """
    sketch = sketch_of(shape, n_layers, skew, fmt)
    write_file(path, sketch.keys, sketch.parts, seed)


def sketch_of(shape: Shape, n_layers: int, skew: float = 0.5, fmt: str = MIXED) -> Sketch:
    """The keys and tensors of a file with this many of a model's layers."""
    sketch = Sketch(shape.architecture, n_layers, skew, None if fmt == MIXED else fmt)
    shape.describe(sketch)
    return sketch
