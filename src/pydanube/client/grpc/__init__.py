"""gRPC from the client's side: the compatibility services, for commands that call them and for `admin`.

Applications use the native protocol (`pydanube.connect`); nothing here is imported for it.
"""
