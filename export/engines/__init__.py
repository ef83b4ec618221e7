"""Engines that are built on a device, for that device: TensorRT's, kept in a cache."""
