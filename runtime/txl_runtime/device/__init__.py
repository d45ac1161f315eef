"""The loop on a GPU: device memory, queue of work and recorded work, and the engines that run there."""
