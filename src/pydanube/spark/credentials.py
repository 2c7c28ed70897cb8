"""Tokens and certificates, where they are needed: on the driver and on every executor.

    token.file              read again whenever a connection is made, so a token can be renewed while a stream runs
    tls.ca, .cert, .key     a path; the name of a file that Spark distributes (spark.files); or the PEM text itself

Nothing of it is ever shown: errors name the option and the file.
"""

from __future__ import annotations

import os
import ssl
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from pydanube.errors import ConfigError
from pydanube.spark.options import PEM, BrokerOptions


def token_of(connection: BrokerOptions) -> str | Callable[[], str]:
    """The token, or a function that reads it. The file is read once here, so that a missing one is told at once."""
    if connection.token_file is None:
        return connection.token
    name = connection.token_file

    def read() -> str:
        try:
            found = Path(file_of(name)).read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError("token.file", name, f"a file with a token: {error}") from error
        if not found:
            raise ConfigError("token.file", name, "a file with a token; it is empty")
        return found

    read()
    return read


def tls_of(connection: BrokerOptions) -> ssl.SSLContext | None:
    """None: the system's certificates. Raises ConfigError."""
    ca, cert, key = connection.tls_ca, connection.tls_cert, connection.tls_key
    if ca is None and cert is None:
        return None
    option = "tls.ca"
    try:
        if ca is not None and is_pem(ca):
            context = ssl.create_default_context(cadata=ca)
        else:
            context = ssl.create_default_context(cafile=None if ca is None else file_of(ca))
        if cert is not None and key is not None:
            option = "tls.cert"
            with ExitStack() as stack:
                context.load_cert_chain(stack.enter_context(_as_file(cert)), stack.enter_context(_as_file(key)))
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        shown = ca if option == "tls.ca" else cert
        named = "text" if shown is not None and is_pem(shown) else shown
        raise ConfigError(option, named, f"certificates in PEM, as files or as text: {error}") from error
    return context


def is_pem(value: str) -> bool:
    return value.lstrip().startswith(PEM)


def file_of(name: str) -> str:
    """The path itself, or the file of that name that Spark has brought here."""
    if not os.path.exists(name):
        from pyspark import SparkFiles

        try:
            brought = SparkFiles.get(os.path.basename(name))
        except (AssertionError, AttributeError, TypeError):  # no session, and no task: nothing was brought
            return name
        if os.path.exists(brought):
            return brought
    return name


@contextmanager
def _as_file(value: str) -> Iterator[str]:
    """Python reads certificates with their keys from files only. This one is for us alone, and is gone at once."""
    if not is_pem(value):
        yield file_of(value)
        return
    descriptor, path = tempfile.mkstemp(prefix="danube-", suffix=".pem")
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(value)
        yield path
    finally:
        os.unlink(path)
