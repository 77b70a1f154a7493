"""The command line: each module reads the arguments of its commands and hands over."""
