"""A vehicle that drives through a CARLA simulator, with a camera and boxes."""
