"""The GPU executor: a step of a model as one captured graph of kernels.

Nothing here names a model: launches are built from `ModelSpec`, kernels come from `ops.gpu`.
"""
