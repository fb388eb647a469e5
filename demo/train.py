"""Train the demo's classifier and write `digits.npz`, `samples.npz` and `digits.onnx`. Needed only to make these again.

    pip install torch==2.11.0 onnx scipy scikit-learn
    python demo/train.py

Takes half a minute on 16 CPU cores and prints the accuracy on the held-out test images.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.nn import functional

from digits import FILE, INPUT_NAME, SIZE, Images, load

CALIBRATION_IMAGES = 48
EPOCHS = 8
BATCH = 32
MODEL = Path(__file__).with_name("digits.onnx")
SAMPLES = Path(__file__).with_name("samples.npz")


class ConvNorm(nn.Sequential):
    """Convolution, batch norm (folded by the export) and an optional activation."""

    def __init__(
        self, inputs: int, outputs: int, kernel: int, *, stride: int = 1, groups: int = 1, act: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)
        self.norm = nn.BatchNorm2d(outputs)
        if act is not None:
            self.act = act


class Gate(nn.Module):
    """Squeeze-and-excite: scales each channel by a sigmoid of all channel means."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.squeeze = nn.Conv2d(channels, channels // 8, 1)
        self.relu = nn.ReLU()
        self.excite = nn.Conv2d(channels // 8, channels, 1)
        self.sigmoid = nn.Sigmoid()

    def forward(self, x: Tensor) -> Tensor:
        """Return `x` with its channels scaled."""
        mean = functional.adaptive_avg_pool2d(x, 1)
        return x * self.sigmoid(self.excite(self.relu(self.squeeze(mean))))


class Mobile(nn.Module):
    """A gated depthwise-separable block: little arithmetic a value, so INT8 has little to gain here."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.expand = ConvNorm(channels, 2 * channels, 1, act=nn.Hardswish())
        self.depthwise = ConvNorm(2 * channels, 2 * channels, 3, groups=2 * channels, act=nn.Hardswish())
        self.gate = Gate(2 * channels)
        self.project = ConvNorm(2 * channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of `x`'s shape."""
        return x + self.project(self.gate(self.depthwise(self.expand(x))))


class Residual(nn.Module):
    """Two dense 7x7 convolutions around a shortcut: much arithmetic a value, where INT8 pays."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = ConvNorm(channels, channels, 7, act=nn.ReLU())
        self.conv2 = ConvNorm(channels, channels, 7)
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of `x`'s shape."""
        return self.relu(x + self.conv2(self.conv1(x)))


class Classifier(nn.Module):
    """Images (n, 1, SIZE, SIZE) to ten logits."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = ConvNorm(1, 32, 3, stride=2, act=nn.ReLU())
        self.down = ConvNorm(32, 64, 3, stride=2, act=nn.ReLU())
        self.stage1 = nn.Sequential(Residual(64), Residual(64))
        self.stage2 = Mobile(64)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits of shape (n, 10)."""
        x = self.stage2(self.stage1(self.down(self.stem(x))))
        return self.head(self.pool(x).flatten(1))


def shifted(images: Tensor) -> Tensor:
    """Move a batch by up to three pixels each way, the only augmentation."""
    dx, dy = (int(v) for v in torch.randint(-3, 4, (2,)))
    return torch.roll(images, (dy, dx), (2, 3))


def train(images: Images) -> Classifier:
    """Return a classifier in evaluation mode; initial weights, order and shifts are drawn with a fixed seed."""
    torch.manual_seed(0)
    pixels, digits = torch.from_numpy(images.pixels), torch.from_numpy(images.digits)
    model = Classifier().to(memory_format=torch.channels_last)  # faster on a CPU than the default layout
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.02)
    steps = EPOCHS * (len(digits) // BATCH)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=steps)
    for epoch in range(EPOCHS):
        total = 0.0
        for batch in torch.randperm(len(digits)).split(BATCH)[: len(digits) // BATCH]:
            loss = functional.cross_entropy(model(shifted(pixels[batch])), digits[batch], label_smoothing=0.05)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            total += loss.item()
        print(f"epoch {epoch + 1}/{EPOCHS}  loss {total * BATCH / len(digits):.4f}", flush=True)
    return model.to(memory_format=torch.contiguous_format).eval()


def save_images() -> None:
    """Split scikit-learn's digits with a fixed seed; write the parts, and the calibration images enlarged."""
    pixels, digits = load_digits(return_X_y=True)
    rest_pixels, test_pixels, rest, test = train_test_split(
        pixels, digits, test_size=0.25, random_state=0, stratify=digits
    )
    train_pixels, calibration_pixels, train, calibration = train_test_split(
        rest_pixels, rest, test_size=CALIBRATION_IMAGES, random_state=0, stratify=rest
    )
    arrays = {
        "train_pixels": train_pixels,
        "train_digits": train,
        "calibration_pixels": calibration_pixels,
        "calibration_digits": calibration,
        "test_pixels": test_pixels,
        "test_digits": test,
    }
    np.savez_compressed(FILE, **{name: array.astype(np.uint8) for name, array in arrays.items()})
    np.savez_compressed(SAMPLES, **{INPUT_NAME: load().calibration.pixels})


def main() -> None:
    """Write the images, train, print the accuracy and export with a fixed batch of one image."""
    save_images()
    split = load()
    model = train(split.train)
    with torch.no_grad():
        guesses = torch.cat([model(part).argmax(1) for part in torch.from_numpy(split.test.pixels).split(50)])
    print(f"accuracy on {len(guesses)} test images: {(guesses.numpy() == split.test.digits).mean():.4f}")
    torch.onnx.export(
        model,
        (torch.zeros(1, 1, SIZE, SIZE),),
        MODEL,
        dynamo=False,
        opset_version=17,
        input_names=[INPUT_NAME],
        output_names=["logits"],
    )


if __name__ == "__main__":
    main()
