"""Measure a bundle, without torch, so that it can be done on the device.

`measuring.bench` is the whole measurement; `works` lists the tasks that are timed, and `driving` makes random inputs.
`timing` lets competitors take turns; `floor` computes the bytes that a step must read and measures the speed of memory;
`competitor` defines a competitor; `overhead` is the cost of Python; `on_device` is the part that differs on a device;
`processes` measures load time and memory. `competitors` are PyTorch's, and need torch. `competitors.agreement` checks
that a competitor computes the same as the bundle.
"""
