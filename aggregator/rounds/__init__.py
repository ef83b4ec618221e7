"""When rounds begin, close and end: decisions only."""
