"""fingerprint: what tells a model apart from others of its names and sizes, such as finetunes.

Reading all weights would take as long as loading them.  Training changes nearly every value of the
tensors that it changes, and what a text leaves in a cache depends on all layers: a sample of each
tensor is enough, and the numbers of the architecture.
"""

from __future__ import annotations

import hashlib

from runtime.models.mapped_file import want_pages
from runtime.models.model import Model

SAMPLE_BYTES = 4096
"""Of a tensor; a smaller one, such as a norm, is read whole."""
DIGEST_BYTES = 16
STEP, STEPS = 40503, 1 << 16
"""Places within tensors, the golden ratio apart from one to the next: where only some experts were
trained, samples at the same place in every layer might miss them."""


def fingerprint(model: Model) -> str:
    """Of an open model: 32 hexadecimal digits."""
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    prefix = f"{model.spec.architecture}."
    keys = sorted((key, model.metadata[key]) for key in model.metadata if key.startswith(prefix))
    digest.update(repr(keys).encode())
    samples = []
    for index, weight in enumerate(model.weights.values()):
        start = max(weight.n_bytes - SAMPLE_BYTES, 0) * (index * STEP % STEPS) // STEPS
        sample = weight.data.reshape(-1)[start : start + SAMPLE_BYTES]
        want_pages(sample.ctypes.data, sample.nbytes)
        samples.append(sample)
    for sample in samples:  # those on the disk were asked for together
        digest.update(sample.data)
    return digest.hexdigest()
