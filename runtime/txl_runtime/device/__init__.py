"""The loop on a GPU: a device's memory, queue and recorded work, and the engines that run there."""
