"""Finds the states of an ONNX graph, its axes, and sizes with which it runs."""
