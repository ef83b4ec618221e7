"""Where work for many clients is done: in this process, or on a Ray cluster that a child of it drives."""
