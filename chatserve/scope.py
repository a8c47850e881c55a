"""Cache scopes: who may see which cached tokens.

A scope is built on the server from the authenticated tenant and from everything else that decides what a
KV block contains (model and template revision). It is a typed tuple, never a concatenated string, and never
comes from a request body; a client's salt can only narrow it. A request carries an ordered tuple of the
scopes it may see, widest first; the last one is its own, where it publishes.
"""

from __future__ import annotations

from typing import Literal

import msgspec


class Scope(msgspec.Struct, frozen=True, array_like=True):
    """One compartment of the prefix cache.

    Attributes:
        kind: ``public`` (operator-published), ``group`` (published to named tenants) or ``tenant`` (private).
        owner: tenant or group name; empty for ``public``.
        model_revision: identity of the weights that computed the blocks.
        template_revision: identity of the chat template and tokenizer.
        salt: client-chosen narrowing; empty for none.
    """

    kind: Literal["public", "group", "tenant"]
    owner: str = ""
    model_revision: str = ""
    template_revision: str = ""
    salt: str = ""
