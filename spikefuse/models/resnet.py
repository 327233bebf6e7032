"""Spiking-ResNet18: ResNet18 with a neuron in place of each ReLU.

Source of the topology: He et al., "Deep Residual Learning for Image Recognition", CVPR 2016; of
its spiking form: Li et al., "Towards Scalable GPU-Accelerated SNN Training via Temporal Fusion",
section 5.2. The neuron after a residual sum receives the sum, as the ReLU does.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

STAGES = (64, 128, 256, 512)


class BasicBlock(nn.Module):
    """`neuron(norm(conv(neuron(norm(conv(x))))) + shortcut(x))`; a `stride` of 2 halves it."""

    def __init__(
        self, neuron: Callable[[], nn.Module], in_channels: int, channels: int, stride: int
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, channels, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.neuron1 = neuron()
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)
        self.neuron2 = neuron()
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or in_channels != channels:
            self.shortcut = nn.Sequential(
                nn.Conv2d(in_channels, channels, 1, stride, bias=False), nn.BatchNorm2d(channels)
            )

    def forward(self, x: Tensor) -> Tensor:
        y = self.neuron1(self.norm1(self.conv1(x)))
        return self.neuron2(self.norm2(self.conv2(y)) + self.shortcut(x))


def resnet18(
    neuron: Callable[[], nn.Module], in_channels: int, num_classes: int, size: tuple[int, int]
) -> nn.Sequential:
    """Spiking-ResNet18 with the stem of the original: 7 x 7 convolution and max pooling, which
    quarter the input's size.

    Shapes: `[B, C, H, W]` to `[B, num_classes]`, with any channels and size.

    Args:
        neuron, in_channels, num_classes, size: see `spikefuse.models`; `size` is not needed.
    """
    layers: list[nn.Module] = [
        nn.Conv2d(in_channels, STAGES[0], 7, stride=2, padding=3, bias=False),
        nn.BatchNorm2d(STAGES[0]),
        neuron(),
        nn.MaxPool2d(3, stride=2, padding=1),
    ]
    width = STAGES[0]
    for channels in STAGES:
        stride = 1 if channels == width else 2
        layers += [
            BasicBlock(neuron, width, channels, stride),
            BasicBlock(neuron, channels, channels, 1),
        ]
        width = channels
    return nn.Sequential(
        *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, num_classes)
    )
