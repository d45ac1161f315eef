"""ONNX files that others exported: what they are, and what they remember."""
