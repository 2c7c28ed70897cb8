"""What a child process gets of our environment: what it needs to run, and no secret that is not for it.

An environment is read by every process of the same user, by the children's own children, and by crash reports.
"""

from __future__ import annotations

import os
from typing import Final

# Where programs and libraries are, which language and time zone people have, whom TLS trusts. A name with a star is a
# beginning.
SYSTEM: Final = (
    *("PATH", "HOME", "LANG", "LC_*", "LD_LIBRARY_PATH", "SYSTEMROOT", "TZ", "TMPDIR"),
    *("SSL_CERT_FILE", "SSL_CERT_DIR"),
)
PYTHON: Final = ("PYTHON*", "VIRTUAL_ENV", "COVERAGE_*")
# What stores of objects are reached with: obstore reads it where the settings leave it open.
CLOUDS: Final = ("AWS_*", "GOOGLE_*", "AZURE_*", "IDENTITY_*", "MSI_*", "*_PROXY", "*_proxy")
# What Spark, its JVM and Hadoop are told by, and how a supervisor's runs are set up.
SPARK: Final = (
    *("JAVA_*", "JDK_*", "SPARK_*", "PYSPARK_*", "HADOOP_*", "YARN_*", "KRB5*", "KUBERNETES_*"),
    *("USER", "LOGNAME", "SHELL", "TERM", "XDG_CACHE_HOME"),
)
ETCD: Final = ("GODEBUG", "GOGC", "GOMAXPROCS", "GOMEMLIMIT", "ETCD_UNSUPPORTED_ARCH")


def child_environment(*groups: tuple[str, ...]) -> dict[str, str]:
    """Ours, with `SYSTEM` and these groups of names alone."""
    names = [name for group in (SYSTEM, *groups) for name in group]
    return {key: value for key, value in os.environ.items() if any(_is(key, name) for name in names)}


def _is(key: str, name: str) -> bool:
    if name.endswith("*"):
        return key.startswith(name[:-1])
    if name.startswith("*"):
        return key.endswith(name[1:])
    return key == name
