"""PyDanube: a reliable pub/sub and streaming platform.

Importing the package is cheap: it loads nothing but this file, so that every part of it,
the pure core included, can be used without paying for the others.
"""

from typing import Final

# The same number as in pyproject.toml; tests/test_tidy.py keeps the two alike. A constant,
# because reading the installed metadata takes longer than importing all of core.
__version__: Final = "0.1.0"

__all__ = ["__version__"]
