"""What GPUs have computed: one JSON line a kernel and case, in a file per GPU.

A row holds for the kernel whose `proof_hash` it names (text, launch, reference), so a kernel that
changed has no row until it has run again. `python -m tests.results --record` runs all cases on the
first GPU and writes its file anew; `--missing` lists kernels without a passing row.

    kernel, case        the catalog's name, and which operands
    passed, compared    whether the results were right, and how many values were compared
    max_error           largest absolute difference; 0 where bits are asked for
    proof_hash, device, driver, date
"""
