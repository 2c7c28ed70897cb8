"""What travels between processes: generated messages, and their way to our values and errors and back.

`_pb` registers the reference's packages in protobuf's default pool, where the official client registers the
same ones. So the broker's side alone imports it: never this package itself, and never `pydanube.client`.
"""
