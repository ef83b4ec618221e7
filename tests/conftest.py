"""Its presence puts ``tests/`` on the path, so that tests can import ``support``."""
