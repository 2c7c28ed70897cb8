"""An application of one's own, as small as can be: bills what was ordered. `test_billing.py` beside it is its test."""

from __future__ import annotations

import pydanube


async def bill_next(client: pydanube.Client) -> str:
    """Waits for an order, and publishes its bill. The order is done when the bill is on disk."""
    async with (
        client.consumer("/default/orders", subscription="billing", start="earliest") as orders,
        client.producer("/default/bills") as bills,
    ):
        order = await orders.receive()
        customer, cents = order.payload.decode().split(" ")
        if not cents.isdecimal():
            await order.nack(delay=3600, reason=f"{cents} is no price")
            return f"refused: {order.payload.decode()}"
        bill = f"{customer} owes {int(cents) / 100:.2f}"
        await bills.send(bill.encode(), key=customer)
        await order.ack()
        return bill
