"""The files that other tools want beside the weights: configuration and tokenizer, copied from where the model came from.

`config.json` says the dtype of the weights, so it is changed where an export changes that; nothing else is touched. Not here: when a copy
becomes the file (`publish.py`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any, TypeAlias

import torch

from trainer_kit.exceptions import CheckpointError, ConfigurationError
from trainer_kit.storage import Folder
from trainer_kit.weights.publish import COMPANION, COMPANIONS, write_temporary

CONFIG = "config.json"
_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "*.tmp", "pytorch_model*", "*.bin", "*.gguf")
_DTYPE_KEYS = ("dtype", "torch_dtype")  # the second is the name that transformers gave it before version 4.56

StrPath: TypeAlias = str | os.PathLike[str]


class Companions:
    """given: a folder, of which the files that go with a model are taken, or the files themselves; paths or URLs.

    dtype: what the weights are cast to. Raises CheckpointError for one that is not there.
    """

    def __init__(self, given: StrPath | Sequence[StrPath] | None, dtype: torch.dtype | None) -> None:
        self._dtype = dtype
        self._found: dict[str, Folder] = {}
        self._written: list[str] = []
        for path in [] if given is None else [given] if isinstance(given, str | os.PathLike) else given:
            for folder, name in _files(path):
                if self._found.setdefault(name, folder) is not folder:
                    raise ConfigurationError(f"companions= has two files of the name {name!r}; expected each name once")

    def write(self, target: Folder) -> list[str]:
        """Write the temporaries of those that are not in `target` as they are, and return their names."""
        for name, folder in self._found.items():
            data = self._content(name, folder)
            if not target.exists(name) or target.read(name) != data:
                self._written.append(name)
                write_temporary(target, name + COMPANION, [data])
        return self._written

    def _content(self, name: str, folder: Folder) -> bytes:
        if name != CONFIG or self._dtype is None:
            return folder.read(name)
        config = folder.read_object(name, CheckpointError)
        _set_dtype(config, str(self._dtype).removeprefix("torch."))
        return (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode()


def _files(path: StrPath) -> Iterable[tuple[Folder, str]]:
    place = Folder(path)
    if place.is_folder(""):
        names = [name for name in place.names() if _goes_with_a_model(name) and not place.is_folder(name)]
        if not names:
            raise CheckpointError(f"companions={os.fspath(path)!r}: no configuration or tokenizer file is in that folder")
        return [(place, name) for name in names]
    parent, _, name = place.url.rpartition("/")
    if not place.exists():
        raise CheckpointError(f"companions={os.fspath(path)!r}: there is no such file or folder")
    if any(fnmatchcase(name, pattern) for pattern in _WEIGHTS):
        raise ConfigurationError(f"companions={os.fspath(path)!r}: these are weights, which the export writes; expected other files")
    return [(Folder(parent or "/"), name)]


def _goes_with_a_model(name: str) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in COMPANIONS) and not any(fnmatchcase(name, pattern) for pattern in _WEIGHTS)


def _set_dtype(config: dict[str, Any], text: str) -> None:
    """In the entries that are there, also in those of parts such as `text_config`; in a new one if there is none at the top."""
    config.update(dict.fromkeys([key for key in _DTYPE_KEYS if key in config] or ["torch_dtype"], text))
    for key, part in config.items():
        if key.endswith("_config") and isinstance(part, dict) and any(entry in part for entry in _DTYPE_KEYS):
            part.update(dict.fromkeys([entry for entry in _DTYPE_KEYS if entry in part], text))
