"""SPAN: a sequence's part of a step, as the jobs that carry a state from token to token read it."""

from __future__ import annotations

import numpy as np

SPAN = np.dtype([("token", "i4"), ("n_tokens", "i4"), ("position", "i4"), ("slot", "i4")])
"""Tokens [token, token + n_tokens) of the step, the first at `position` of its sequence.

slot: where the sequence's state is.  At position 0 the state is empty, whatever the slot holds.
"""
SPAN_BYTES = SPAN.itemsize
