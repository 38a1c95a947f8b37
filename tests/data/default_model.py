"""The real default model for tests: fetched and converted on first use, then from the user's cache."""

from functools import lru_cache
from pathlib import Path

from contbatch_cli.data.model_store import resolve
from contbatch_cli.data.tokenizer import Tokenizer

DEFAULT_MODEL = "smollm2-135m-instruct"


@lru_cache(maxsize=1)
def default_model_dir() -> Path:
    return resolve(DEFAULT_MODEL)


@lru_cache(maxsize=1)
def default_tokenizer() -> Tokenizer:
    return Tokenizer.from_directory(default_model_dir())
