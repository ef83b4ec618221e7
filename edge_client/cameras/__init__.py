"""Where pictures come from: cameras, streams, recordings and simulators, one file each, behind ``base.Camera``."""
