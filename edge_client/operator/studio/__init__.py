"""The label studio: a device's live picture in a browser, and its least certain frames, which wait for a label."""
