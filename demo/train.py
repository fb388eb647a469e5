"""Train the demo's classifier and write `digits.onnx`. Needed only to make that file again.

    .venv/bin/pip install torch==2.13.0
    .venv/bin/python demo/train.py

Takes some 15 minutes on two busy CPU cores and prints the accuracy on the held-out test images.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from digits import INPUT_NAME, SIZE, Images, load

EPOCHS = 8
BATCH = 32
MODEL = Path(__file__).with_name("digits.onnx")


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
    """Two dense 3x3 convolutions around a shortcut: much arithmetic a value, where INT8 pays."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = ConvNorm(inputs, outputs, 3, stride=stride, act=nn.ReLU())
        self.conv2 = ConvNorm(outputs, outputs, 3)
        same = inputs == outputs and stride == 1
        self.shortcut = nn.Identity() if same else ConvNorm(inputs, outputs, 1, stride=stride)
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of `outputs` channels, smaller by `stride`."""
        return self.relu(self.shortcut(x) + self.conv2(self.conv1(x)))


class Classifier(nn.Module):
    """Images (n, 1, SIZE, SIZE) to ten logits."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = ConvNorm(1, 64, 3, stride=2, act=nn.ReLU())
        self.stage1 = nn.Sequential(Mobile(64), Mobile(64))
        self.stage2 = nn.Sequential(*(Residual(64, 64) for _ in range(3)))
        self.stage3 = nn.Sequential(Residual(64, 128, stride=2), Residual(128, 128))
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits of shape (n, 10)."""
        x = self.stage3(self.stage2(self.stage1(self.stem(x))))
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


def main() -> None:
    """Train, print the accuracy and export with a fixed batch of one image."""
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
