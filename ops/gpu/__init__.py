"""The GPU kernels as data, one file a kind: PTX text, parameters, launch, NumPy reference.

`ops.gpu.catalog` lists every one that ships.  Nothing here knows a driver.
"""
