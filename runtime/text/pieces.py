"""How much text may have to be tokenized in one piece."""

from __future__ import annotations

from runtime.errors import RequestError

MAX_PIECE = 1 << 21
"""Characters: some hundred MB while they are tokenized, and a fifth of what a regular expression
may go back over before the library gives up."""


def check_piece(n_characters: int) -> None:
    """Raises: RequestError where they are too many."""
    if n_characters > MAX_PIECE:
        raise RequestError(
            "prompt",
            f"has {n_characters} characters that can only be tokenized together; at most "
            f"{MAX_PIECE} can: put line breaks between words",
        )
