"""The HTTP server: OpenAI's API and llama-server's own on top of `runtime`'s public names.

Nothing here computes.  A handler parses a request, lets the engine generate and renders the tokens.
"""
