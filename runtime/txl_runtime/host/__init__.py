"""The loop on the CPU, which runs graphs with ONNX Runtime."""
