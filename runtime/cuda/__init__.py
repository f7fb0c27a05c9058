"""The CUDA device.  Today it is only looked for; the GPU executor builds on this package."""
