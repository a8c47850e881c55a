"""Fixtures of the text tests: every kind of small tokenizer, and the real model's folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from chatserve.model.store import resolve
from chatserve.text.tokenizer import Tokenizer
from tests.text import vocabularies


@pytest.fixture(scope="session", params=["byte_level", "sentencepiece", "metaspace"])
def definition(request: pytest.FixtureRequest) -> dict[str, Any]:
    build = {
        "byte_level": vocabularies.byte_level,
        "sentencepiece": vocabularies.sentencepiece,
        "metaspace": vocabularies.metaspace,
    }
    return build[request.param]()


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The prepared folder of SmolLM2-135M-Instruct; fetched on first use."""
    return resolve("smollm2-135m").path


@pytest.fixture(scope="session")
def smollm2_tokenizer(smollm2: Path) -> Tokenizer:
    return Tokenizer.from_folder(smollm2)
