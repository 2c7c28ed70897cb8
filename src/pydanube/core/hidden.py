"""What must not be shown: which settings are secrets, by their names, and what stands for one in a sentence."""

from __future__ import annotations

import re
from typing import Final

HIDDEN: Final = "(hidden)"

_WORDS: Final = ("secret", "token", "passw", "credential", "access-key", "access_key", "account_key", "account-key")
_PLACES: Final = ("file", "path", "url", "uri", "provider")


def names_a_secret(key: str) -> bool:
    """Whether a setting of this name is one that others must not see, and not the place of one."""
    name = key.lower()
    return any(word in name for word in _WORDS) and re.split(r"[._-]", name)[-1] not in _PLACES
