"""The loop on a GPU: memory, queue and recorded work of a device, and the engines that run there."""
