"""The model and its tokenizer, from a GGUF file."""

from typing import Any

from transformers import AutoModelForCausalLM, AutoTokenizer


def model(folder: str, file: str) -> Any:
    """Load the model: 4-bit weights become float32."""
    return AutoModelForCausalLM.from_pretrained(folder, gguf_file=file).eval()


def tokenizer(folder: str, file: str) -> Any:
    """Load the tokenizer."""
    return AutoTokenizer.from_pretrained(folder, gguf_file=file)
