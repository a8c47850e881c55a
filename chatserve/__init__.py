"""chatserve: an async streaming chat server for large language models with a shared, scoped prefix cache."""

__version__ = "0.1.0"
