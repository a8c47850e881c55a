"""The sandbox that chat templates run in: Jinja2 with what Hugging Face templates expect, and nothing else.

Knows Jinja; does not know messages or tokens. Templates come from a model's folder only, never from a request,
and even so they may not walk attributes, change what they are given, load other templates or run without end in
one ``range``. Used by `chatserve.text.chat_template`.
"""

from __future__ import annotations

import datetime
import json
from typing import Any, NoReturn

import jinja2
import jinja2.exceptions
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from chatserve.errors import ModelLoadError


class TemplateRefusalError(jinja2.TemplateError):
    """A template called ``raise_exception``: it does not accept these messages, and says why."""


class _Generation(jinja2.ext.Extension):
    """``{% generation %}`` marks answers for training; when serving, its body is simply rendered."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's own declaration

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def compile_template(source: str) -> jinja2.Template:
    """Compile a chat template.

    Raises:
        ModelLoadError: it is no valid template, or reaches for private attributes.
    """
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    try:
        _refuse_private_attributes(environment.parse(source))
        return environment.from_string(source)
    except jinja2.TemplateError as error:
        raise ModelLoadError(
            f"The model's chat template cannot be used: {error}. Correct chat_template.jinja in its folder."
        ) from error


def _refuse_private_attributes(template: jinja2.nodes.Template) -> None:
    # The sandbox would refuse them when reached; this finds them before the first request does.
    names = [node.attr for node in template.find_all(jinja2.nodes.Getattr)]
    names += [
        node.arg.value
        for node in template.find_all(jinja2.nodes.Getitem)
        if isinstance(node.arg, jinja2.nodes.Const) and isinstance(node.arg.value, str)
    ]
    private = sorted({name for name in names if name.startswith("__")})
    if private:
        raise jinja2.exceptions.SecurityError(f"it reaches for {', '.join(private)}, which no chat template needs")


def _raise_exception(message: object) -> NoReturn:
    raise TemplateRefusalError(str(message))


def _strftime_now(format: str) -> str:
    return datetime.datetime.now().strftime(format)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes for HTML, which would put \\u003c into prompts.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
