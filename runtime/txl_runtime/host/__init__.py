"""The loop on the CPU, by ONNX Runtime."""
