"""Settings, logging, metrics endpoint: what every long-running process shares."""
