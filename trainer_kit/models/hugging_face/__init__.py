"""Models in the layout of Hugging Face: their `config.json`, the names of their weights, and a provider that reads and writes both.

Nothing here imports transformers: what it writes and expects is described in `read_config.py`, `write_config.py` and `layout.py`.
"""

from trainer_kit.models.hugging_face.provider import HuggingFaceProvider, provider_from_hf
from trainer_kit.models.hugging_face.write_config import hf_config

__all__ = ["HuggingFaceProvider", "hf_config", "provider_from_hf"]
