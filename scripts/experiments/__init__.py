"""Experiments on recorded driving and at full scale."""
