"""Takes an ONNX file from its bytes to a module that calls it, and to a bundle's programs."""
