"""The command line: one file per command; a command imports its room when it runs."""
