"""The `danube` command. `main.py` is the entry point; each group of subcommands is one file."""
