"""Captures ONNX graphs of any model, rewrites them to a bundle's operators, quantises them, and writes weight files."""
