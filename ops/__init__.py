"""What is computed: block formats, the arithmetic contract and its kernels.

`ops.quants` describes the weight formats, `ops.arithmetic` defines every quantized product in
NumPy, and the packages beside them implement the same bits for a processor.  Nothing here knows
about models, requests or files.
"""
