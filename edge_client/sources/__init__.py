"""Where a device's labelled samples and frames come from."""
