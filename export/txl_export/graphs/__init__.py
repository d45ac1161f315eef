"""ONNX graphs of any model: capture, rewriting to a bundle's operators, quantisation, weight files, bf16 emulation."""
