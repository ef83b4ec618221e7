"""What runs on the GPU box: rounds, admission, replay-based aggregation, publishing, store."""
