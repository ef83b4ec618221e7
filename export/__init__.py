"""Trained model to TorchScript or ONNX: parity-checked artefacts, and the runtime that serves them."""
