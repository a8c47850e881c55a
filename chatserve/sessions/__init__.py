"""Conversations: a tree of messages per conversation, token-exact where the tokens are known.

Knows tenants and messages; knows no sockets, no engine and no rendering. The server's WebSocket hub is its caller.
"""
