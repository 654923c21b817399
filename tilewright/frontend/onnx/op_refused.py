"""Known but unsupported operators, each with a reason."""

from __future__ import annotations

from tilewright.frontend.onnx.registry import refuse

refuse(
    "the shape of its result depends on data",
    "NonZero",
    "Unique",
    "Compress",
    "NonMaxSuppression",
)
refuse(
    "random numbers",
    "RandomNormal",
    "RandomNormalLike",
    "RandomUniform",
    "RandomUniformLike",
    "Multinomial",
    "Bernoulli",
)
refuse("strings", "StringNormalizer", "StringSplit", "StringConcat", "RegexFullMatch", "TfIdfVectorizer")
refuse("decoding of files", "ImageDecoder")
