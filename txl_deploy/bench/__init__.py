"""Measuring a bundle, without torch, so that it can be done on the device.

`measuring.bench` is the whole measurement; `works` says what a bundle is timed at, and `driving` gives it random
inputs. `timing` lets competitors take turns; `floor` says what a step must read and how fast the machine reads;
`competitor` says what a competitor is; `overhead` is the cost of Python; `on_device` is what differs on a device;
`processes` measures load time and memory. `competitors` are PyTorch's, and need torch.
`competitors.agreement` tells whether one computes what the bundle computes.
"""
