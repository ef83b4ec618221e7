"""ONNX graphs: made, folded, simplified, rounded. Needs torch and onnx."""
