"""ONNX files, whatever the model: tracing, weights by offset, quantised products, emulated bf16."""
