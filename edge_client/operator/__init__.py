"""What people at the device see and say: status, metrics, feedback, the picture on a screen."""
