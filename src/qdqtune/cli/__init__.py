"""The command line: parses arguments and prints results. No other folder prints."""
