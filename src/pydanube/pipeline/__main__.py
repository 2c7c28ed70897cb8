"""`python -m pydanube.pipeline …` is `danube pipeline …`."""

import sys

from pydanube.cli.main import main

sys.argv.insert(1, "pipeline")
main()
