"""Training in a process of its own: its jobs, its pace, its place behind serving."""
