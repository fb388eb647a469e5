"""Texts as inputs of a model, split by the tokenizer.json of its tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from qdqtune.calibration.inputs import InputSpec, listed
from qdqtune.calibration.user_code import user_errors
from qdqtune.errors import BadData, BadOption
from qdqtune.types import Array

TOKENIZER, TOKENIZER_SETTINGS, MODEL_SETTINGS = "tokenizer.json", "tokenizer_config.json", "config.json"

IDS, MASK, TYPES, POSITIONS, PAST = "input_ids", "attention_mask", "token_type_ids", "position_ids", "past_key_values."

OTHER_NAMES = {"input_mask": MASK, "segment_ids": TYPES}
"""What some exporters name these inputs."""

USUAL_TOKENS, MOST_TOKENS = 512, 10**6
"""Texts are cut at so many tokens where nothing says how many the model takes. Transformers writes numbers above
`MOST_TOKENS` for no limit. Chosen, not measured."""


@dataclass(frozen=True)
class Texts:
    """Makes the inputs of a model from texts. `ids` is its input of token ids."""

    specs: tuple[InputSpec, ...]
    ids: InputSpec
    tokenizer: Any

    @property
    def batch(self) -> int:
        """The number of texts in a sample."""
        return self.ids.shape[0] or 1

    def arrays(self, texts: Sequence[str]) -> dict[str, Array]:
        """The inputs for texts of one sample; inputs that no text gives are left out."""
        found = self.tokenizer.encode_batch(list(texts))
        mask = np.array([one.attention_mask for one in found])
        values: dict[str, Array] = {
            IDS: np.array([one.ids for one in found]),
            MASK: mask,
            TYPES: np.array([one.type_ids for one in found]),
            POSITIONS: np.where(mask == 0, 1, mask.cumsum(1) - 1),  # as Transformers counts in generation
        }
        made = {spec.name: values.get(OTHER_NAMES.get(spec.name, spec.name)) for spec in self.specs}
        made |= {s.name: np.zeros(_without_past(s, len(texts))) for s in self.specs if s.name.startswith(PAST)}
        return {spec.name: array.astype(spec.dtype) for spec in self.specs if (array := made[spec.name]) is not None}


def _without_past(spec: InputSpec, batch: int) -> tuple[int, ...]:
    """The shape of a cache of keys or values before the first token."""
    return (batch, *(size or 0 for size in spec.shape[1:]))


def texts_for(
    specs: Sequence[InputSpec], find: Callable[[Sequence[str]], tuple[Path, Mapping[str, Any]] | None], origin: str
) -> Texts:
    """What makes the inputs of a model from texts; `find` gives the first file of some names with its JSON object.

    Texts are cut and padded to the length of the model's inputs. Where that is dynamic, they keep their own up to the
    number of tokens that tokenizer_config.json or config.json names.

    Raises:
        BadData: the model has no input for token ids, or there is no tokenizer.
        BadOption: tokenizers is not installed.
    """
    ids = next((spec for spec in specs if spec.name == IDS and len(spec.shape) == 2), None)
    if ids is None:
        raise BadData(f"{origin} holds texts, which need an input {IDS}: the model has {listed(tuple(specs))}")
    if (found := find([TOKENIZER])) is None:
        how = "AutoTokenizer.from_pretrained(NAME).save_pretrained(FOLDER) writes it"
        raise BadData(f"{origin} holds texts: put their {TOKENIZER} beside the model or the texts ({how})")
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise BadOption("reading texts needs tokenizers: pip install 'qdqtune[data]'") from error
    settings, model = ((find([name]) or (None, {}))[1] for name in (TOKENIZER_SETTINGS, MODEL_SETTINGS))
    with user_errors(f"cannot use the tokenizer {found[0]}", BadData):  # the library raises nothing narrower
        tokenizer = Tokenizer.from_file(str(found[0]))
        length = ids.shape[1]
        tokenizer.enable_truncation(length or _most_tokens(tokenizer, settings, model))
        pad = _pad_token(tokenizer, settings, model)
        side = "left" if settings.get("padding_side") == "left" else "right"
        tokenizer.enable_padding(direction=side, pad_id=pad, pad_token=tokenizer.id_to_token(pad) or "", length=length)
    return Texts(tuple(specs), ids, tokenizer)


def _most_tokens(tokenizer: Any, settings: Mapping[str, Any], model: Mapping[str, Any]) -> int:
    """The largest number of tokens that the model takes, as far as files tell."""
    own = (tokenizer.truncation or {}).get("max_length")
    told = (settings.get("model_max_length"), model.get("max_position_embeddings"), own)
    return next((int(n) for n in told if isinstance(n, int | float) and 0 < n < MOST_TOKENS), USUAL_TOKENS)


def _pad_token(tokenizer: Any, settings: Mapping[str, Any], model: Mapping[str, Any]) -> int:
    """The id that fills a sequence; 0 where no file names one."""
    told = settings.get("pad_token")
    text = told.get("content") if isinstance(told, dict) else told
    known = tokenizer.token_to_id(text) if isinstance(text, str) else None
    told = (known, model.get("pad_token_id"), (tokenizer.padding or {}).get("pad_id"))
    return next((n for n in told if isinstance(n, int) and n >= 0), 0)
