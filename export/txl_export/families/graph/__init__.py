"""Makes bundles of ONNX files that others exported, and finds the states of these files."""
