"""The `danube` command. `main.py` is the door; each group of subcommands is one file."""
