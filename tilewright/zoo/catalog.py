"""The contents of the zoo: names, sizes and inputs, without PyTorch. `registry.py` builds the models."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Card:
    """A model's description for users."""

    name: str
    description: str
    paper: str
    parameters: int
    inputs: tuple[str, ...]  # of batch 1: "f32[1,3,224,224]"


_IMAGE_224 = ("f32[1,3,224,224]",)
_IMAGE_256 = ("f32[1,3,256,256]",)
_IMAGE_512 = ("f32[1,3,512,512]",)
_TOKENS = ("i64[1,128]",)
_FEATURES = ("f32[1,1050,256]", "f32[1,1050,256]")

_RESNET = "He et al., Deep Residual Learning for Image Recognition, CVPR 2016"
_REPVGG = "Ding et al., RepVGG: Making VGG-style ConvNets Great Again, CVPR 2021"
_BERT = "Devlin et al., BERT: Pre-training of Deep Bidirectional Transformers, NAACL 2019"
_VIT = "Dosovitskiy et al., An Image is Worth 16x16 Words, ICLR 2021"
_DETR = "Carion et al., End-to-End Object Detection with Transformers, ECCV 2020"
_SETR = "Zheng et al., Rethinking Semantic Segmentation with Transformers, CVPR 2021"

CATALOG: dict[str, Card] = {
    card.name: card
    for card in (
        Card(
            "resnet18",
            "ResNet-18, image classifier of basic residual blocks",
            _RESNET,
            11_689_512,
            _IMAGE_224,
        ),
        Card(
            "resnet50",
            "ResNet-50, image classifier of bottleneck residual blocks",
            _RESNET,
            25_557_032,
            _IMAGE_224,
        ),
        Card(
            "vgg16",
            "VGG-16, image classifier: 3x3 convolutions and large dense layers",
            "Simonyan and Zisserman, Very Deep Convolutional Networks, ICLR 2015",
            138_357_544,
            _IMAGE_224,
        ),
        Card(
            "repvgg-a0",
            "RepVGG-A0 in deployed form, image classifier: a plain stack of 3x3 convolutions",
            _REPVGG,
            8_309_384,
            _IMAGE_224,
        ),
        Card(
            "repvgg-a0-branches",
            "RepVGG-A0 in training form, three branches in each block",
            _REPVGG,
            9_108_968,
            _IMAGE_224,
        ),
        Card(
            "mobilenetv2",
            "MobileNetV2, image classifier: depthwise convolutions, inverted residuals",
            "Sandler et al., MobileNetV2: Inverted Residuals and Linear Bottlenecks, CVPR 2018",
            3_504_872,
            _IMAGE_224,
        ),
        Card(
            "bert-tiny",
            "BERT encoder, 2 layers of width 128",
            "Turc et al., Well-Read Students Learn Better, 2019",
            4_369_408,
            _TOKENS,
        ),
        Card("bert-base", "BERT encoder, 12 layers of width 768", _BERT, 108_891_648, _TOKENS),
        Card("bert-large", "BERT encoder, 24 layers of width 1024", _BERT, 334_092_288, _TOKENS),
        Card(
            "gpt2",
            "GPT-2 small, causal decoder, 12 layers of width 768",
            "Radford et al., Language Models are Unsupervised Multitask Learners, 2019",
            124_439_808,
            _TOKENS,
        ),
        Card("vit-b16", "Vision Transformer, base, patches of 16 x 16", _VIT, 86_567_656, _IMAGE_224),
        Card("vit-l16", "Vision Transformer, large, patches of 16 x 16", _VIT, 304_326_632, _IMAGE_224),
        Card("vit-h14", "Vision Transformer, huge, patches of 14 x 14", _VIT, 632_045_800, _IMAGE_224),
        Card(
            "detr-3", "the transformer of DETR, 3 encoder and 6 decoder layers", _DETR, 13_443_840, _FEATURES
        ),
        Card(
            "detr-6", "the transformer of DETR, 6 encoder and 6 decoder layers", _DETR, 17_389_056, _FEATURES
        ),
        Card(
            "detr-12",
            "the transformer of DETR, 12 encoder and 6 decoder layers",
            _DETR,
            25_279_488,
            _FEATURES,
        ),
        Card(
            "setr-naive-base",
            "SETR, semantic segmentation, ViT-B encoder, naive decoder",
            _SETR,
            86_668_694,
            _IMAGE_512,
        ),
        Card(
            "setr-naive",
            "SETR, semantic segmentation, ViT-L encoder, naive decoder",
            _SETR,
            304_448_662,
            _IMAGE_512,
        ),
        Card(
            "setr-pup",
            "SETR, semantic segmentation, ViT-L encoder, progressive upsampling decoder",
            _SETR,
            308_316_822,
            _IMAGE_512,
        ),
        Card(
            "unet",
            "U-Net, semantic segmentation, transposed convolutions and skips",
            "Ronneberger et al., U-Net: Convolutional Networks for Biomedical Segmentation, MICCAI 2015",
            31_037_698,
            _IMAGE_256,
        ),
        Card(
            "retinanet",
            "RetinaNet, object detection, ResNet-50 with feature pyramid and two heads",
            "Lin et al., Focal Loss for Dense Object Detection, ICCV 2017",
            34_068_119,
            _IMAGE_512,
        ),
    )
}


def names() -> list[str]:
    """Every model of the zoo, in the order of the catalog."""
    return list(CATALOG)
