"""The option that names the outputs which hold scores of classes."""

from __future__ import annotations

from dataclasses import dataclass

from qdqtune.options import NAMES, Names, Options, option


@dataclass(kw_only=True)
class ScoreOption(Options):
    """Which outputs hold scores of classes (see `numerics.scores`)."""

    scores: Names = option(
        NAMES,
        (),
        "Outputs that hold scores of classes, tokens or pixels, whose best class is compared with the float model's: "
        "NAME or NAME:AXIS, by commas, where AXIS is that of the classes (1 of four, the last of three); or none. Of "
        "raw scores of pixels the values do not tell.",
        "Accuracy",
        default_in_words="what the float model's values show",
        metavar="NAME[:AXIS]",
        is_repeated=True,
        is_rare=True,
    )
