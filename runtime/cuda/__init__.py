"""The CUDA device: its memory, streams, modules and graphs, over the driver API alone.

Every object of the driver is a `Resource`: open it with `with`; nothing waits for a finalizer.
Importing this package needs neither a driver nor its bindings.
"""
