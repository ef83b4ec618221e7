"""Words and bytes of the fleet: pure values, no sockets, no files."""
