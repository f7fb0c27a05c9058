"""Memory through which the CPU team hands rows of tables to a GPU's step.

It is host memory that both see: some words, then two places for rows, which steps have by turns.
The team gathers a step's rows in its place, then stores its number; nothing is ever reset.
"""

from __future__ import annotations

from ops import exchange

READY = 0
"""u64 number of the last step whose rows are complete."""
HEARTBEAT, FAILED = exchange.HEARTBEAT, exchange.FAILED
"""As those of an exchange, but that the second word of a step that failed means nothing."""
ROWS = 512
"""u8[PLACES, *], the rows."""
PLACES = 2
