"""SlotImage: a sequence's tokens, KV pages and state as bytes, to save and restore slots."""

from __future__ import annotations

import hashlib
import json
import struct
from dataclasses import dataclass

import numpy as np

from runtime.checks import shown
from runtime.errors import RequestError

MAGIC = b"HXSLOT1\n"
DIGEST_BYTES = 16
MAX_HEADER_BYTES = 4096


@dataclass(frozen=True)
class SlotImage:
    """model: what the pages depend on (model and cache types); page_images: one per page, all the
    same length; state: recurrent state after the tokens, empty where the model has none.

    In the file: magic, u32 length of the JSON header, header, tokens as i32, state, page images,
    digest of it all.
    """

    model: str
    page_tokens: int
    tokens: list[int]
    page_images: list[bytes]
    state: bytes = b""

    def to_bytes(self) -> bytes:
        page_bytes = len(self.page_images[0]) if self.page_images else 0
        header = json.dumps(
            {
                "model": self.model,
                "page_tokens": self.page_tokens,
                "n_tokens": len(self.tokens),
                "page_bytes": page_bytes,
                "state_bytes": len(self.state),
            }
        ).encode()
        tokens = np.array(self.tokens, dtype="<i4").tobytes()
        start = (MAGIC, struct.pack("<I", len(header)), header, tokens, self.state)
        body = b"".join((*start, *self.page_images))
        return body + _digest(body)

    @classmethod
    def from_bytes(cls, image: bytes) -> SlotImage:
        """Raises: RequestError where `image` is not what `to_bytes` gave."""
        if not isinstance(image, bytes):
            raise RequestError("image", f"{shown(image)}: use the bytes that were saved")
        start = len(MAGIC) + 4
        body, digest = image[:-DIGEST_BYTES], image[-DIGEST_BYTES:]
        if len(body) < start or body[: len(MAGIC)] != MAGIC or _digest(body) != digest:
            raise RequestError("filename", "this is not a saved slot, or it is damaged")
        (n_header,) = struct.unpack_from("<I", body, len(MAGIC))
        if n_header > MAX_HEADER_BYTES:
            raise RequestError("filename", "this is not a saved slot, or it is damaged")
        # The digest matched, so the header is as it was written.
        header = json.loads(body[start : start + n_header])
        start += n_header
        n_tokens, page_tokens = header["n_tokens"], header["page_tokens"]
        tokens = np.frombuffer(body, dtype="<i4", count=n_tokens, offset=start).tolist()
        start += 4 * n_tokens
        end = start + header.get("state_bytes", 0)
        state, start = body[start:end], end
        size = header["page_bytes"]
        pages = [body[at : at + size] for at in range(start, len(body), size)] if size else []
        return cls(header["model"], page_tokens, tokens, pages, state)


def _digest(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=DIGEST_BYTES).digest()
