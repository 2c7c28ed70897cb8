"""The client without async, for scripts and notebooks: `from pydanube.blocking import connect`."""

from pydanube.client.blocking import Client, Consumer, Fetch, Message, MessageBatch, Producer, Tail, connect

__all__ = ["Client", "Consumer", "Fetch", "Message", "MessageBatch", "Producer", "Tail", "connect"]
