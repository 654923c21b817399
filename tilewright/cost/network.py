"""The network of the attention model, in NumPy: embeddings of tokens, self-attention, and a head for each member.

    tokens --(two layers for each level)--> vectors of 64 --(2 x self-attention and a two-layer network)--> vectors
    mean of the vectors and the vector of the terms --> 4 members, each a residual of log seconds; validity

The members share everything but their heads, so that they agree near the training data and differ far from it. If the
weights have trees (`forest.py`), each member is averaged with them: trees and attention err on different tasks.
`dataset/train.py` has the same network in PyTorch; a test compares the two.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from tilewright.cost.forest import Forest, flat_rows
from tilewright.cost.tokens import KNOB_FEATURES, WIDTHS, Tokens
from tilewright.cost.vocabulary import BUCKETS
from tilewright.errors import WeightsError

WIDTH, HEADS, LAYERS, HIDDEN = 64, 4, 2, 128
MEMBERS, MEMBER_WIDTH = 4, 32
FOREST_SHARE = 0.6  # of each member's prediction, if there are trees
LEVELS = ("task", "machine", "terms", "instruction", "knob")
SINGLE = LEVELS[:4]  # levels with one token
STATEMENT = "statement"  # a further level, for experiments: hardly any config has its loop program
_CHUNK = 128  # candidates at a time, so that what is between stays in the cache
_EPSILON = 1e-5
_FAR = -1e9


class Output(NamedTuple):
    """`members`: (members, n), the log ratio to the analytical prediction."""

    members: np.ndarray
    valid: np.ndarray


def shapes(levels: Sequence[str] = LEVELS) -> dict[str, tuple[int, ...]]:
    """The tensors of a network. A level of LEVELS that it does not attend to is masked, and has them too."""
    found: dict[str, tuple[int, ...]] = {}
    for level in (*LEVELS, STATEMENT) if STATEMENT in levels else LEVELS:
        found[f"norm.{level}.mean"] = found[f"norm.{level}.scale"] = (WIDTHS[level],)
        if level != "knob":
            found |= {f"{level}.w1": (WIDTHS[level], WIDTH), f"{level}.b1": (WIDTH,)}
            found |= {f"{level}.w2": (WIDTH, WIDTH), f"{level}.b2": (WIDTH,)}
    found |= {"knob.table": (BUCKETS, WIDTH), "knob.linear": (BUCKETS, KNOB_FEATURES, WIDTH)}
    for number in range(LAYERS):
        layer = f"layer{number}"
        found |= {
            f"{layer}.{name}": (WIDTH,) for name in ("gain1", "shift1", "gain2", "shift2", "out_b", "f2_b")
        }
        found |= {
            f"{layer}.qkv": (WIDTH, 3 * WIDTH),
            f"{layer}.qkv_b": (3 * WIDTH,),
            f"{layer}.out": (WIDTH, WIDTH),
        }
        found |= {f"{layer}.f1": (WIDTH, HIDDEN), f"{layer}.f1_b": (HIDDEN,), f"{layer}.f2": (HIDDEN, WIDTH)}
    found |= {"final.gain": (WIDTH,), "final.shift": (WIDTH,)}
    found |= {"member.w1": (MEMBERS, 2 * WIDTH, MEMBER_WIDTH), "member.b1": (MEMBERS, MEMBER_WIDTH)}
    found |= {"member.w2": (MEMBERS, MEMBER_WIDTH), "member.b2": (MEMBERS,)}
    found |= {"valid.w": (2 * WIDTH,), "valid.b": (1,)}
    return found


def parameters() -> int:
    return sum(int(np.prod(shape)) for name, shape in shapes().items() if not name.startswith("norm."))


@dataclass(frozen=True)
class AttentionNetwork:
    """`levels`: those that it attends to; the others are masked."""

    tensors: Mapping[str, np.ndarray]
    levels: tuple[str, ...] = LEVELS

    @cached_property
    def forest(self) -> Forest | None:
        return Forest.of(self.tensors)

    def __post_init__(self) -> None:
        wanted = shapes(self.levels)
        wrong = [
            name
            for name, shape in wanted.items()
            if name not in self.tensors or self.tensors[name].shape != shape
        ]
        if wrong:
            raise WeightsError(f"the weights do not fit the network: {', '.join(wrong[:3])}")
        _ = self.forest  # trees that do not fit are refused now

    def __call__(self, tokens: Tokens) -> Output:
        parts = [self._averaged(tokens[slice(at, at + _CHUNK)]) for at in range(0, len(tokens), _CHUNK)]
        if not parts:
            return Output(np.zeros((MEMBERS, 0)), np.zeros(0))
        return Output(
            np.concatenate([part.members for part in parts], axis=1),
            np.concatenate([part.valid for part in parts]),
        )

    def _averaged(self, tokens: Tokens) -> Output:
        out = self._forward(tokens)
        if self.forest is None:
            return out
        return out._replace(
            members=out.members + FOREST_SHARE * (self.forest(flat_rows(tokens)) - out.members)
        )

    def attention(self, tokens: Tokens) -> np.ndarray:
        """(n, tokens): how much the other tokens attend to each in the last layer, averaged over heads."""
        seen: list[np.ndarray] = []
        self._forward(tokens, seen)
        return np.asarray(seen[-1].mean(axis=(1, 2)))

    def _forward(self, tokens: Tokens, seen: list[np.ndarray] | None = None) -> Output:
        w = self.tensors
        vectors, mask = self._embedded(tokens)
        far = np.where(mask, 0.0, _FAR).astype(np.float32)[:, None, None, :]
        for number in range(LAYERS):
            layer = f"layer{number}"
            normal = _normal(vectors, w[f"{layer}.gain1"], w[f"{layer}.shift1"])
            vectors = vectors + self._attended(normal, far, layer, seen)
            normal = _normal(vectors, w[f"{layer}.gain2"], w[f"{layer}.shift2"])
            hidden = np.maximum(normal @ w[f"{layer}.f1"] + w[f"{layer}.f1_b"], 0.0)
            vectors = vectors + (hidden @ w[f"{layer}.f2"] + w[f"{layer}.f2_b"])
        vectors = _normal(vectors, w["final.gain"], w["final.shift"])
        weights = mask.astype(np.float32)
        mean = np.einsum("ntd,nt->nd", vectors, weights) / weights.sum(axis=1, keepdims=True)
        embedding = np.concatenate([mean, vectors[:, SINGLE.index("terms")]], axis=1)
        hidden = np.maximum(
            np.einsum("nd,mdh->mnh", embedding, w["member.w1"], optimize=True) + w["member.b1"][:, None], 0.0
        )
        members = np.einsum("mnh,mh->mn", hidden, w["member.w2"]) + w["member.b2"][:, None]
        score = embedding @ w["valid.w"] + w["valid.b"]
        return Output(members, 1 / (1 + np.exp(-np.clip(score, -30, 30))))

    def _embedded(self, tokens: Tokens) -> tuple[np.ndarray, np.ndarray]:
        """(vectors, mask): the single tokens, then knobs, then statements."""
        w, count = self.tensors, len(tokens)
        parts, masks = [], []
        for level in SINGLE:
            values = getattr(tokens, level)
            if values.strides[0] == 0:  # the same for all candidates
                values = values[:1]
            vector = self._two_layers(level, values)
            parts.append(np.broadcast_to(vector, (count, WIDTH))[:, None])
            masks.append(np.full((count, 1), level in self.levels))
        knobs = (tokens.knobs - w["norm.knob.mean"]) * w["norm.knob.scale"]
        linear = w["knob.linear"][tokens.buckets]  # (n, k, features, d)
        parts.append(w["knob.table"][tokens.buckets] + np.einsum("nkf,nkfd->nkd", knobs, linear))
        masks.append(tokens.knob_mask & ("knob" in self.levels))
        if tokens.statements.shape[1] and STATEMENT in self.levels:
            parts.append(self._two_layers(STATEMENT, tokens.statements))
            masks.append(tokens.statement_mask)
        return np.concatenate(parts, axis=1, dtype=np.float32), np.concatenate(masks, axis=1)

    def _two_layers(self, level: str, values: np.ndarray) -> np.ndarray:
        w = self.tensors
        normal = np.clip((values - w[f"norm.{level}.mean"]) * w[f"norm.{level}.scale"], -5.0, 5.0)
        hidden = np.maximum(normal @ w[f"{level}.w1"] + w[f"{level}.b1"], 0.0)
        return np.asarray(hidden @ w[f"{level}.w2"] + w[f"{level}.b2"])

    def _attended(
        self, vectors: np.ndarray, far: np.ndarray, layer: str, seen: list[np.ndarray] | None
    ) -> np.ndarray:
        w, (count, length, _) = self.tensors, vectors.shape
        each = WIDTH // HEADS
        qkv = (vectors @ w[f"{layer}.qkv"] + w[f"{layer}.qkv_b"]).reshape(count, length, 3, HEADS, each)
        query, key, value = (qkv[:, :, number].transpose(0, 2, 1, 3) for number in range(3))
        scores = query @ key.transpose(0, 1, 3, 2) / np.float32(np.sqrt(each)) + far
        scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
        scores = scores / scores.sum(axis=-1, keepdims=True)
        if seen is not None:
            seen.append(scores)
        mixed = (scores @ value).transpose(0, 2, 1, 3).reshape(count, length, WIDTH)
        return np.asarray(mixed @ w[f"{layer}.out"] + w[f"{layer}.out_b"])


def _normal(values: np.ndarray, gain: np.ndarray, shift: np.ndarray) -> np.ndarray:
    centred = values - values.mean(axis=-1, keepdims=True)
    variance = np.einsum("ntd,ntd->nt", centred, centred)[..., None] / values.shape[-1]
    return np.asarray(centred / np.sqrt(variance + np.float32(_EPSILON)) * gain + shift)
