"""The served model in a process of its own, where a crash, a hang or a leak can't reach the cameras."""
