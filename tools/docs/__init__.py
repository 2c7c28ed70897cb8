"""Pages of docs/ that are made from the code: commands.py and configuration.py print one each."""
