"""The API process that `benchmarks.streaming` measures: chatserve as it is served, over an engine that is paced.

Run: ``python -m benchmarks._paced_server FOLDER PORT``; `write_folder` makes the folder, a tokenizer without weights.
"""

from __future__ import annotations

import asyncio
import json
import random
import string
import sys
from pathlib import Path

import uvloop

from benchmarks._paced_engine import FACTORY, NUM_CONTROL, NUM_WORDS
from chatserve.config import Config, EngineConfig, ModelConfig, ServerConfig
from chatserve.engine.client import EngineClient
from chatserve.engine.launch import EngineChild
from chatserve.server.run import serve

MODEL = "paced"
_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
_SPACE = "\u0120"  # how byte-level BPE spells a space


def write_folder(folder: Path) -> Path:
    """A byte-level tokenizer with `NUM_WORDS` words of 1 to 8 letters after a space each, and three control tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE

    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    vocabulary = {chr(byte if byte in printable else 256 + others.index(byte)): byte for byte in range(NUM_CONTROL)}
    rng = random.Random(3)
    while len(vocabulary) < NUM_CONTROL + NUM_WORDS:
        word = _SPACE + "".join(rng.choices(string.ascii_lowercase, k=rng.randint(1, 8)))
        vocabulary.setdefault(word, len(vocabulary))
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    for text in ("<|endoftext|>", "<|im_start|>", "<|im_end|>"):
        tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False)])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    (folder / "generation_config.json").write_text("{}")
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (folder / "chat_template.jinja").write_text(_TEMPLATE)
    return folder


async def _run(config: Config, child: EngineChild) -> None:
    engine = EngineClient(config.engine, child)
    await engine.start()
    try:
        await serve(config, engine)
    finally:
        await engine.close()


def main() -> None:
    folder, port = sys.argv[1:3]
    config = Config(
        engine=EngineConfig(model=ModelConfig(path=folder, name=MODEL), executor=FACTORY),
        server=ServerConfig(port=int(port), log_level="warning", ui=False),
    )
    child = EngineChild(config.engine)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_run(config, child))


if __name__ == "__main__":
    main()
