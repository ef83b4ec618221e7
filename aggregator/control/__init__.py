"""What operators tell a running aggregator: one set of verbs for command line, local socket, HTTP and console."""
