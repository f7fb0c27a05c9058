"""Experts that are not all on the GPU: which ones are, who computes the others.

`exchange` hands what a step misses to the CPU team; `cache`, `policy` and `uploader` decide which
experts the GPU holds and bring them there. `cache` and `policy` import no device.
"""
