"""A small tokenizer for a task, in Hugging Face form, and the text <-> token ids translation that workers use.

It is a word-level tokenizer over the task's own symbols. Spaces are part of the symbols (" + "), so decoding gives the
text back exactly.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

PAD, BOS, EOS, UNK = "<pad>", "<bos>", "<eos>", "<unk>"
VOCABULARY_MULTIPLE = 32  # so that the embedding can be cut evenly for tensor parallelism


class Codec:
    """Text to token ids and back, with the id that ends a sequence."""

    def __init__(self, tokenizer: Tokenizer, eos: str):
        self._tokenizer = tokenizer
        eos_id = tokenizer.token_to_id(eos)
        if eos_id is None:
            raise ValueError(f"the tokenizer has no token {eos!r}, which should end a sequence")
        self.eos_id = eos_id

    @property
    def vocab_size(self) -> int:
        return self._tokenizer.get_vocab_size()

    def encode(self, text: str) -> list[int]:
        """Token ids of a text; nothing is added before or after."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def token(self, text: str) -> int:
        """The id of a text that is a single token. Raises ValueError when it is not."""
        ids = self.encode(text)
        if len(ids) != 1 or self._tokenizer.decode(ids, skip_special_tokens=False) != text:
            raise ValueError(f"{text!r} is not one token of the tokenizer, but {ids}")
        return ids[0]

    def decode(self, ids: list[int]) -> str:
        """The text up to the first end-of-sequence token. Other special tokens stay visible, so they spoil an answer."""
        if self.eos_id in ids:
            ids = ids[: ids.index(self.eos_id)]
        return self._tokenizer.decode(ids, skip_special_tokens=False)

    def save(self, directory: str | Path) -> None:
        """Write the files from which transformers (`AutoTokenizer`) and SGLang load this tokenizer."""
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        special = {"pad_token": PAD, "bos_token": BOS, "eos_token": EOS, "unk_token": UNK}
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            "model_max_length": 1_000_000,
            **special,
        }
        self._tokenizer.save(str(directory / "tokenizer.json"))
        (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
        (directory / "special_tokens_map.json").write_text(json.dumps(special, indent=2) + "\n")


def build(symbols: list[str]) -> Codec:
    """A tokenizer whose tokens are pad, bos, eos, unk (ids 0 to 3), then `symbols`, then unused ones up to a multiple of 32.

    Raises ValueError when a symbol is empty or there twice.
    """
    if len(set(symbols)) != len(symbols) or "" in symbols:
        raise ValueError(f"symbols of a tokenizer must be distinct and not empty: {symbols}")
    tokens = [PAD, BOS, EOS, UNK, *symbols]
    tokens += [f"<unused{n}>" for n in range(-len(tokens) % VOCABULARY_MULTIPLE)]
    tokenizer = Tokenizer(models.WordLevel({token: n for n, token in enumerate(tokens)}, unk_token=UNK))
    longest_first = sorted(symbols, key=len, reverse=True)
    pattern = Regex("|".join(re.escape(symbol) for symbol in longest_first))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(pattern, behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([PAD, BOS, EOS, UNK])
    return Codec(tokenizer, EOS)


def load(directory: str | Path) -> Codec:
    """Read a tokenizer directory: `tokenizer.json`, and the name of its end token from `tokenizer_config.json`.

    Raises FileNotFoundError when one of them is missing, ValueError when no end token is named.
    """
    directory = Path(directory)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if not (directory / name).is_file():
            raise FileNotFoundError(f"{directory / name} is missing: not a tokenizer directory")
    eos = json.loads((directory / "tokenizer_config.json").read_text()).get("eos_token")
    if isinstance(eos, dict):  # older files hold the whole AddedToken
        eos = eos.get("content")
    if not eos:
        raise ValueError(f"{directory / 'tokenizer_config.json'} names no eos_token: the end of an answer would be unknown")
    return Codec(Tokenizer.from_file(str(directory / "tokenizer.json")), eos)
