"""What travels between processes: generated messages, and their way to our values and errors and back.

`_pb.danube` registers the reference's packages in protobuf's default pool, where the official client registers the
same ones. So the broker's side alone imports it (by `convert`): never this package itself, and never `pydanube.client`.
The client needs `frames`, `errors_on_wire` and `_pb.pydanube.stream_pb2`, whose package is ours alone.
"""
