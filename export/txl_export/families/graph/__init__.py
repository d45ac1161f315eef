"""ONNX files that others exported: finds their states and makes bundles of them."""
