"""`python -m pydanube` is the `danube` command."""

from pydanube.cli.main import main

if __name__ == "__main__":
    main()
