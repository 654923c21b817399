"""Models of Hugging Face's transformers, with random weights: PyTorch, torch.compile with our backend, tilewright.

    python benchmarks/hf_models.py                     every model at its base size
    python benchmarks/hf_models.py --small             tiny configurations, as in the tests
    python benchmarks/hf_models.py --models bert vit --threads 2
    python benchmarks/hf_models.py --models clip --threads 1 --cpu-time --guards     on a machine that others use

Each line: milliseconds per call (median, the three alternating) in PyTorch, through
`torch.compile(backend="tilewright")` and through `tilewright.compile`, the seconds of compiling, and the largest
relative L2 error of any result against float64. The exit status is 1 if an error is above the bound or a model fails;
the others are run all the same.

`--guards` adds a column: the time through torch.compile without Dynamo's own part, over that of `tilewright.compile`.
Dynamo's part is what torch.compile adds with a backend that only calls the model of `tilewright.compile`.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree

Call = dict[str, Any]
BATCH, TOKENS, VOCABULARY = 2, 7, 100
BOUND = 1e-4  # of a whole model in float32


@dataclass(frozen=True)
class Model:
    """`build(small)` gives a model in eval mode and the keyword arguments of a call."""

    build: Callable[[bool], tuple[nn.Module, Call]]


def _made(kind: str, small: dict[str, Any], base: dict[str, Any], is_small: bool, head: str = "Model") -> Any:
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**(small if is_small else base))
    return getattr(transformers, f"{kind}{head}")(config).eval()


def _text(vocabulary: int, small: bool, length: int = 128) -> Call:
    generator = torch.Generator().manual_seed(0)
    shape = (BATCH, TOKENS) if small else (1, length)
    ids = torch.randint(3, vocabulary if not small else VOCABULARY, shape, generator=generator)
    mask = torch.ones_like(ids)
    if small:
        mask[1, 5:] = 0
    return {"input_ids": ids, "attention_mask": mask}


def _image(size: int, batch: int = 1, seed: int = 0) -> Call:
    return {"pixel_values": torch.randn(batch, 3, size, size, generator=torch.Generator().manual_seed(seed))}


ENCODER = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
}
WORDS = {
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
PATCHES = {**ENCODER, "image_size": 32, "patch_size": 8}


def _encoder(kind: str, small: dict[str, Any], base: dict[str, Any] | None = None) -> Model:
    def build(is_small: bool) -> tuple[nn.Module, Call]:
        model = _made(kind, small, base or {}, is_small)
        return model, _text(model.config.vocab_size, is_small)

    return Model(build)


def _vision(kind: str, small: dict[str, Any], size: int, base: dict[str, Any] | None = None) -> Model:
    def build(is_small: bool) -> tuple[nn.Module, Call]:
        return _made(kind, small, base or {}, is_small), _image(size if is_small else 224)

    return Model(build)


def _decoder(kind: str, small: dict[str, Any], base: dict[str, Any], head: str = "ForCausalLM") -> Model:
    def build(is_small: bool) -> tuple[nn.Module, Call]:
        model = _made(kind, {**small, "use_cache": False}, {**base, "use_cache": False}, is_small, head)
        return model, _text(model.config.vocab_size, is_small)

    return Model(build)


class CachedStep(nn.Module):
    """One step of generation as a function: the new token and the cache in, logits and the longer cache out."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, past: list[tuple[torch.Tensor, torch.Tensor]]) -> Any:
        from transformers import DynamicCache

        cache = DynamicCache()
        for layer, (keys, values) in enumerate(past):
            cache.update(keys, values, layer)
        result = self.model(input_ids=input_ids, past_key_values=cache, use_cache=True)
        layers = result.past_key_values.layers
        return result.logits, [(layer.keys, layer.values) for layer in layers]


GPT2 = {
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "vocab_size": VOCABULARY,
    "n_positions": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def _gpt2_with_cache(small: bool) -> tuple[nn.Module, Call]:
    model = _made("GPT2", GPT2, {}, small, "LMHeadModel")
    config = model.config
    generator = torch.Generator().manual_seed(0)
    shape = (BATCH if small else 1, config.n_head, TOKENS if small else 127, config.n_embd // config.n_head)
    past = [
        (torch.randn(shape, generator=generator), torch.randn(shape, generator=generator))
        for _ in range(config.n_layer)
    ]
    ids = torch.randint(3, VOCABULARY, (shape[0], 1), generator=generator)
    return CachedStep(model).eval(), {"input_ids": ids, "past": past}


def _detr(small: bool) -> tuple[nn.Module, Call]:
    import transformers

    torch.manual_seed(0)
    backbone = transformers.ResNetConfig(
        **(RESNET if small else {}), out_features=[f"stage{2 if small else 4}"]
    )
    sizes = {
        "d_model": 32,
        "encoder_layers": 1,
        "decoder_layers": 1,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 64,
        "decoder_ffn_dim": 64,
        "num_queries": 5,
    }
    config = transformers.DetrConfig(
        use_timm_backbone=False,
        use_pretrained_backbone=False,
        backbone=None,
        backbone_config=backbone,
        **(sizes if small else {}),
    )
    model = transformers.DetrForObjectDetection(config).eval()
    call = _image(64 if small else 512)
    size = call["pixel_values"].shape[-1]
    return model, {**call, "pixel_mask": torch.ones(1, size, size, dtype=torch.long)}


RESNET = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 2], "layer_type": "basic"}


def _t5(small: bool) -> tuple[nn.Module, Call]:
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "vocab_size": VOCABULARY}
    model = _made(
        "T5", sizes, {"d_model": 768, "d_ff": 3072, "num_layers": 12, "num_heads": 12}, small, "EncoderModel"
    )
    return model, _text(model.config.vocab_size, small)


def _whisper(small: bool) -> tuple[nn.Module, Call]:
    import transformers

    sizes = {
        "d_model": 32,
        "encoder_layers": 2,
        "encoder_attention_heads": 4,
        "encoder_ffn_dim": 64,
        "decoder_layers": 1,
        "decoder_attention_heads": 4,
        "decoder_ffn_dim": 64,
        "num_mel_bins": 16,
        "max_source_positions": 20,
        "vocab_size": VOCABULARY,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "decoder_start_token_id": 1,
    }
    base = {
        "d_model": 512,
        **{f"{half}_layers": 6 for half in ("encoder", "decoder")},
        **{f"{half}_attention_heads": 8 for half in ("encoder", "decoder")},
        **{f"{half}_ffn_dim": 2048 for half in ("encoder", "decoder")},
    }
    torch.manual_seed(0)
    config = transformers.WhisperConfig(**(sizes if small else base))
    model = transformers.WhisperModel(config).eval().get_encoder()
    frames = 2 * config.max_source_positions
    features = torch.randn(1, config.num_mel_bins, frames, generator=torch.Generator().manual_seed(0))
    return model, {"input_features": features}


def _clip(small: bool) -> tuple[nn.Module, Call]:
    import transformers

    torch.manual_seed(0)
    text = {**ENCODER, **WORDS, "eos_token_id": 2} if small else {}
    vision = PATCHES if small else {}
    config = transformers.CLIPConfig(
        text_config=text, vision_config=vision, projection_dim=16 if small else 512
    )
    model = transformers.CLIPModel(config).eval()
    words = _text(config.text_config.vocab_size, small, 77)
    return model, {**words, **_image(32 if small else 224)}


LLAMA = {**ENCODER, **WORDS, "num_key_value_heads": 2}
LLAMA_BASE = {
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "intermediate_size": 2048,
    "vocab_size": 32000,
}

MODELS: dict[str, Model] = {
    "bert": _encoder("Bert", {**ENCODER, **WORDS}),
    "distilbert": _encoder(
        "DistilBert", {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64, "vocab_size": VOCABULARY}
    ),
    "roberta": _encoder(
        "Roberta", {**ENCODER, **WORDS}, {"max_position_embeddings": 514, "type_vocab_size": 1}
    ),
    "gpt2": _decoder("GPT2", GPT2, {}, "LMHeadModel"),
    "gpt2-cache": Model(_gpt2_with_cache),
    "vit": _vision("ViT", PATCHES, 32),
    "deit": _vision("DeiT", PATCHES, 32),
    "resnet": _vision("ResNet", RESNET, 32),
    "mobilenetv2": _vision("MobileNetV2", {"image_size": 32, "depth_multiplier": 0.25}, 32),
    "convnext": _vision("ConvNext", {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2}, 32),
    "segformer": _vision(
        "Segformer",
        {
            "num_encoder_blocks": 2,
            "depths": [1, 1],
            "sr_ratios": [4, 2],
            "hidden_sizes": [16, 32],
            "patch_sizes": [7, 3],
            "strides": [4, 2],
            "num_attention_heads": [1, 2],
            "mlp_ratios": [2, 2],
        },
        64,
    ),
    "detr": Model(_detr),
    "t5-encoder": Model(_t5),
    "whisper-encoder": Model(_whisper),
    "clip": Model(_clip),
    "llama": _decoder("Llama", LLAMA, LLAMA_BASE),
    "qwen2": _decoder("Qwen2", LLAMA, LLAMA_BASE),
}


# -- comparing ----------------------------------------------------------------------------------------------------


def tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in _pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def error(got: torch.Tensor, truth: torch.Tensor) -> float:
    distance = torch.linalg.vector_norm(got.double() - truth.double())
    return float(distance / torch.linalg.vector_norm(truth.double()).clamp_min(1e-30))


def in_float64(model: nn.Module, call: Call) -> list[torch.Tensor]:
    wide = _pytree.tree_map(
        lambda t: t.double() if isinstance(t, torch.Tensor) and t.is_floating_point() else t, call
    )
    return tensors(copy.deepcopy(model).double()(**wide))


def milliseconds(
    functions: Sequence[Callable[[], Any]], rounds: int, clock: Callable[[], float] = time.perf_counter
) -> list[float]:
    """Medians; in each round every function has its turn of several calls, after a pause in which the threads of the
    one before it fall asleep."""
    times: list[list[float]] = [[] for _ in functions]
    for _ in range(rounds):
        for function, own in zip(functions, times, strict=True):
            time.sleep(0.1)
            function()
            began = time.perf_counter()
            calls = 0
            while calls < 3 or time.perf_counter() - began < 0.2:
                start = clock()
                function()
                own.append(clock() - start)
                calls += 1
    return [1000 * statistics.median(own) for own in times]


def around(model: nn.Module, fast: Callable[[], Any]) -> Callable[..., Any]:
    """The model through Dynamo, whose graph only calls `fast`, and returns what it returned when it was compiled."""

    def backend(graph: Any, examples: Any) -> Any:
        results: list[Any] = []

        def run(*arguments: Any) -> Any:
            if not results:
                results.append(graph.forward(*arguments))
            fast()
            return results[0]

        return run

    return torch.compile(model, backend=backend)


def measured(name: str, options: argparse.Namespace) -> tuple[str, bool]:
    """(The line of a model, whether it is right.)"""
    import tilewright

    threads = options.threads
    model, call = MODELS[name].build(options.small)
    with torch.no_grad():
        truth = in_float64(model, call)
        through = torch.compile(model, backend="tilewright", options={"threads": threads})
        began = time.perf_counter()
        fast = tilewright.compile(model, call, threads=threads)
        seconds = time.perf_counter() - began
        results = [tensors(through(**call)), tensors(fast(**call))]
        worst = max(error(a, b) for result in results for a, b in zip(result, truth, strict=True))
        ways = [model, through, fast, *([around(model, partial(fast, **call))] if options.guards else [])]
        clock = time.process_time if options.cpu_time else time.perf_counter
        eager, ours, whole, *more = milliseconds([partial(f, **call) for f in ways], options.rounds, clock)
    verdict = "" if worst <= BOUND else "  WRONG"
    line = f"{name:16} {eager:9.2f} {ours:9.2f} {whole:9.2f} {seconds:9.1f}s  {worst:.1e}{verdict}"
    if more:
        line += f"  {(ours - more[0] + whole) / whole:.2f}x"
    return line, not verdict


def main() -> int:
    parser = argparse.ArgumentParser(description="transformers' models, compiled")
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--cpu-time", action="store_true", help="of this process, instead of time that passes"
    )
    parser.add_argument("--guards", action="store_true", help="also measure Dynamo's own part")
    options = parser.parse_args()

    from tilewright.integrations.torch_compile import register

    register()
    if options.threads:
        torch.set_num_threads(options.threads)
    print(f"{'model':16} {'PyTorch':>9} {'backend':>9} {'compile':>9} {'compiling':>10}  error", end="")
    print("    beyond guards" if options.guards else "")
    all_right = True
    for name in options.models:
        torch._dynamo.reset()
        try:
            line, right = measured(name, options)
        except Exception as failure:  # one model that fails does not keep the others from being measured
            line, right = f"{name:16} FAILED {type(failure).__name__}: {str(failure)[:300]}", False
        print(line, flush=True)
        all_right = all_right and right
    return 0 if all_right else 1


if __name__ == "__main__":
    sys.exit(main())
