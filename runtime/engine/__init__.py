"""The engine: sequences, scheduler, KV pages, sampling, and the executors that perform steps."""
