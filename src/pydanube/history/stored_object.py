"""A Parquet object in the store, read a row group at a time: to compare two takes the memory of two groups."""

from __future__ import annotations

from pydanube.errors import InvalidObject
from pydanube.formats.parquet import Footer, footer_length
from pydanube.formats.parquet_read import FOOTER_GUESS_BYTES, parse_footer
from pydanube.ports import Buffer, ObjectStore, Work


class StoredObject:
    """`footer` has the checksum that it must have; what `group` returns is not verified."""

    def __init__(self, store: ObjectStore, key: str, footer: Footer) -> None:
        self._store = store
        self._key = key
        self.footer = footer

    @classmethod
    async def open(cls, store: ObjectStore, work: Work, key: str, size: int, footer_crc: int) -> StoredObject:
        """Raises FileNotFoundError if there is none, InvalidObject if it has another size or its footer is damaged."""
        found = (await store.head(key)).size_bytes
        if found != size:
            raise InvalidObject(key, f"it has {found} bytes, its descriptor says {size}")
        length = min(FOOTER_GUESS_BYTES, size)
        tail = await store.get_range(key, size - length, length)
        needed = footer_length(tail)
        if needed > size:
            raise InvalidObject(key, "its footer is longer than the object")
        if needed > length:
            tail = await store.get_range(key, size - needed, needed)
        return cls(store, key, await work.run(lambda: parse_footer(tail, size, footer_crc)))

    async def group(self, number: int) -> Buffer:
        """The bytes of a row group."""
        group = self.footer.row_groups[number]
        return await self._store.get_range(self._key, group.position, group.length)
