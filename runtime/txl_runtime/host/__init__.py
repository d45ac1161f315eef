"""The loop on the CPU, which runs graphs by ONNX Runtime."""
