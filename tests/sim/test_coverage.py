"""Counting which operations a run met."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from tools.sim.coverage import counting, operations, unmet


class Shop:
    @classmethod
    def open(cls) -> Shop:
        return cls()

    def sell(self, what: str) -> str:
        return self._wrap(what)

    async def order(self, what: str) -> str:
        return what

    @staticmethod
    def hours() -> int:
        return 8

    @property
    def name(self) -> str:
        return "shop"

    def _wrap(self, what: str) -> str:
        return f"<{what}>"


def test_calls_are_counted_by_class_and_method_while_it_lasts() -> None:
    counts: Counter[str] = Counter()
    with counting(counts, Shop):
        shop = Shop.open()
        assert (shop.sell("tea"), Shop.hours(), shop.name) == ("<tea>", 8, "shop")
        assert asyncio.run(shop.order("milk")) == "milk"
        shop.sell("tea")
    shop.sell("not counted")
    assert counts == {"Shop.open": 1, "Shop.sell": 2, "Shop.hours": 1, "Shop.order": 1}


def test_what_was_never_called_is_named() -> None:
    assert operations(Shop) == ["Shop.open", "Shop.sell", "Shop.order", "Shop.hours"]
    assert unmet({"Shop.sell": 3}, Shop, but={"Shop.hours"}) == ["Shop.open", "Shop.order"]


def test_methods_are_put_back_also_behind_an_error() -> None:
    before = dict(vars(Shop))
    with pytest.raises(RuntimeError), counting(Counter(), Shop):
        raise RuntimeError
    assert dict(vars(Shop)) == before
