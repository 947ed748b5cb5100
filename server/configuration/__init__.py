"""The options of the commands, and their sources: command line, environment and configuration file."""
