"""VGG-16 (Simonyan and Zisserman 2015), without batch norm, as in the paper.

Parameter names are torchvision's, so that its state dicts load.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn


@dataclass(frozen=True)
class VggConfig:
    stages: tuple[tuple[int, ...], ...] = ((64, 64), (128, 128), (256,) * 3, (512,) * 3, (512,) * 3)
    hidden: int = 4096
    classes: int = 1000
    image_size: int = 224


VGG16 = VggConfig()


class Vgg(nn.Module):
    def __init__(self, config: VggConfig) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = 3
        for stage in config.stages:
            for width in stage:
                layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU()]
                channels = width
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)

        side = config.image_size // 2 ** len(config.stages)
        self.classifier = nn.Sequential(
            nn.Linear(channels * side * side, config.hidden),
            nn.ReLU(),
            nn.Dropout(),
            nn.Linear(config.hidden, config.hidden),
            nn.ReLU(),
            nn.Dropout(),
            nn.Linear(config.hidden, config.classes),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(x).flatten(1))
