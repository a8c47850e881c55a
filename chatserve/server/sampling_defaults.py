"""How a model samples where a request does not say: what its makers put into ``generation_config.json``.

As in vLLM, the model's own defaults win over OpenAI's neutral ones; a field that a request gives wins over both.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from chatserve.errors import ModelLoadError


class SamplingDefaults(msgspec.Struct, frozen=True):
    """Values for fields that a request leaves out; OpenAI's where the model has none."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


class _GenerationConfig(msgspec.Struct):
    do_sample: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


def sampling_defaults(folder: Path) -> SamplingDefaults:
    """The defaults of a prepared model folder.

    Raises:
        ModelLoadError: its ``generation_config.json`` cannot be understood.
    """
    path = folder / "generation_config.json"
    if not path.is_file():
        return SamplingDefaults()
    try:
        given = msgspec.json.decode(path.read_bytes(), type=_GenerationConfig)
    except (msgspec.DecodeError, OSError) as error:
        raise ModelLoadError(f"{path} cannot be read: {error}.") from error
    values = {name: value for name in SamplingDefaults.__struct_fields__ if (value := getattr(given, name)) is not None}
    if given.do_sample is False:
        values["temperature"] = 0.0
    return SamplingDefaults(**values)
