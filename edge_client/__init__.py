"""What runs on a device: camera, inference, round data, local training, upload, download, hot swap."""
