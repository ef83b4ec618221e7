"""Cameras that are there now: one file each, read in a process of their own that can be killed when it hangs."""
