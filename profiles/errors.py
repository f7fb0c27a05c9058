"""The one exception of this package."""

from __future__ import annotations


class ProfileError(Exception):
    """A file is not what it should be, or two things do not belong together; says which and why."""
