"""Give a Hugging Face folder that has no ``tokenizer.json`` one, in a new folder that links to the rest.

Runs as its own process (``python -m chatserve.model.hf_tokenizer SRC DST``), because only transformers knows every
older tokenizer format and importing it takes seconds. Started by `chatserve.model.store`.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import msgspec


def main() -> None:
    """Write tokenizer files of ``argv[1]`` into the folder ``argv[2]`` and link its other files."""
    from transformers import AutoTokenizer

    source, target = Path(sys.argv[1]), Path(sys.argv[2])
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(source), local_files_only=True)
        tokenizer.save_pretrained(str(target))
        if not (target / "tokenizer.json").is_file():
            raise ValueError(f"{type(tokenizer).__name__} has no fast form")
    except Exception as error:  # transformers raises whatever the broken file led to
        message = f"no tokenizer.json can be made from its tokenizer files ({error}). Add a tokenizer.json to it."
        sys.stdout.buffer.write(msgspec.json.encode({"error": message}) + b"\n")
        sys.exit(1)
    for file in source.iterdir():
        if (target / file.name).exists() or file.is_dir():
            continue
        if file.suffix == ".safetensors":
            (target / file.name).symlink_to(file.resolve())
        else:
            shutil.copyfile(file, target / file.name)


if __name__ == "__main__":
    main()
