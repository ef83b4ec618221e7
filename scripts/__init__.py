"""What is run from a checkout: the demo and its report."""
