"""Measure a bundle without torch, so that it can be measured on the machine where it will run.

`measuring.bench` is the whole measurement; `works` lists the tasks that are timed, and `driving` makes random inputs.
`timing` lets competitors take turns; `floor` computes the bytes that a step must read, and measures the memory's speed;
`competitor` defines a competitor; `overhead` measures the cost of Python; `on_device` has the measurements that differ
on a device; `processes` measures load time and memory. The package `competitors` has the competitors in PyTorch, and
needs torch; `competitors.agreement` checks that a competitor computes the same as the bundle.
"""
