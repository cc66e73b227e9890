"""The command line: one file a command, which imports its room only when it runs."""
