"""Everything that both ends say to each other: words and bytes (protocol), and how they travel (transport)."""
