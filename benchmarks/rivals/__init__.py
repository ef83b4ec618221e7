"""Other frameworks doing what a benchmark of ours does, each in an environment of its own and with nothing of ours."""
