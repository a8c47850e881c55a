"""Who may use the server and how much: tenants, their keys, limits and usage.

Knows nothing of HTTP, text or the engine. `chatserve.server` asks it at the edge; ``chatserve tenants`` manages the
same store from the command line.
"""
