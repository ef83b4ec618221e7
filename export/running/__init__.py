"""Exported models at work on a device: needs onnxruntime and numpy, neither torch nor onnx."""
