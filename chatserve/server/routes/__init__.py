"""The HTTP endpoints, one module per concern. `chatserve.server.app` puts them into one table."""
