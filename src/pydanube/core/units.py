"""Units of size, in bytes, and the moment from which times are counted."""

from datetime import UTC, datetime
from typing import Final

KIB: Final = 1 << 10
MIB: Final = 1 << 20

UNIX_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
