"""What GPUs have measured: one JSON line a kernel and shape, in a file per GPU.

A row holds for the text whose hash it names, so a kernel that changed has no row until it has run
again. `python -m tests.results --missing` lists kernels without a row of equal bits.

    kernel, format, shape   which kernel, on [rows, values a row] or [tokens, values]
    launch                  team, block, min_blocks, overlapped (RowLaunch), where it has one
    bits_equal, compared    whether every compared value had the bits of the reference, how many
    experts, us, us_p5, us_p95, gbs, read_us
                            median time of that many experts, and of a bare read of the same bytes
    text_hash, device, driver, date
"""
