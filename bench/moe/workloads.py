"""The workloads: a long reply to a short question, and a short reply to a long text."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path


@dataclass(frozen=True)
class Workload:
    """A prompt and how many tokens are generated after it, greedily and whatever they are.

    text  without the markup of a chat: every model gets the same words
    """

    name: str
    text: str
    n_tokens: int

    def shortened(self, share: float) -> Workload:
        """The same workload with a part of its text and tokens, for a first look."""
        n_characters = max(1, int(len(self.text) * share))
        n_tokens = max(1, int(self.n_tokens * share))
        return replace(self, text=self.text[:n_characters], n_tokens=n_tokens)


def workloads() -> tuple[Workload, ...]:
    """`chat`: 1500 tokens of reply. `code`: a prompt of about 12,000 tokens, then 32."""
    folder = Path(__file__).parent
    return (
        Workload("chat", (folder / "chat.txt").read_text(), 1500),
        Workload("code", (folder / "code.txt").read_text(), 32),
    )
