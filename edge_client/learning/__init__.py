"""What a device learns from: labels, the samples of a round, and local training."""
