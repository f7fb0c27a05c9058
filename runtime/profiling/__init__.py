"""Where each token's time goes: records of steps, and instruments that get them.

`record` says what is known of a step, `profiler` puts it together while the engine runs,
`instrument` is what scripts write; `summary`, `trace_file` and `nvtx_ranges` are instruments.
Nothing here imports the engine, and nothing of it runs unless an instrument is attached.
"""
