"""A tokenizer that needs no model: each byte of UTF-8 is a token, and one more ends an answer."""

import hashlib
import json

import tokenizers

from prfaas.text.tokenizer import Tokenizer, byte_alphabet

EOS_TOKEN = "<|end|>"  # noqa: S105  # a mark, no secret
EOS_ID = 256
VOCAB_SIZE = 257


def byte_tokenizer() -> Tokenizer:
    """Return a tokenizer whose first 256 ids are bytes, and whose last is EOS_TOKEN."""
    alphabet = byte_alphabet()
    spec = {
        "version": "1.0",
        "added_tokens": [
            {
                "id": EOS_ID,
                "content": EOS_TOKEN,
                "special": True,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
            }
        ],
        "pre_tokenizer": {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": False,
            "use_regex": True,
        },
        "decoder": {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": False,
            "use_regex": True,
        },
        "model": {
            "type": "BPE",
            "vocab": {character: alphabet[character] for character in sorted(alphabet)},
            "merges": [],
        },
    }
    text = json.dumps(spec, sort_keys=True)
    return Tokenizer(
        tokenizers.Tokenizer.from_str(text),
        spelling="byte-level",
        fingerprint=hashlib.sha256(text.encode()).hexdigest(),
        bos_id=None,
        eos_ids=[EOS_ID],
        starts_with_bos=False,
    )
