"""Chains of contractions in models for a GPU: which ones the partition makes, and what it says about the others."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from msgspec import structs

import tilewright
from tilewright.frontend import import_torch
from tilewright.graph.task import Partition
from tilewright.hw.gpu import H200
from tilewright.measure.passes import run_calls
from tilewright.rewrites.partition import kind_of
from tilewright.runtime.plan import FusionReport, GroupReport, PartReport, RefusedGroup
from tilewright.support.trace import Trace
from tilewright.targets.cuda import CudaTarget
from tilewright.targets.target import Cutting


def layers(*widths: int) -> Any:
    made = []
    for one, two in pairwise(widths):
        made += [torch.nn.Linear(one, two), torch.nn.ReLU()]
    return torch.nn.Sequential(*made)


class TwoOutputs(torch.nn.Module):
    """The intermediate result is an output too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = layers(256, 64), layers(64, 16)

    def forward(self, x: Any) -> Any:
        y = self.first(x)
        return y, self.second(y)


def cut(model: Any, *shape: int, numerics: str = "fast", cutting: Cutting | None = None) -> Partition:
    imported = import_torch(model.half().eval(), (torch.zeros(*shape, dtype=torch.half),))
    chosen = cutting or Cutting(measured=False)
    return CudaTarget.described(H200).partition(imported, numerics, Trace.off(), cutting=chosen)


def kinds(partition: Partition) -> list[str]:
    return [kind_of(call) for call in partition.calls]


def test_two_linear_layers_are_one_kernel() -> None:
    assert kinds(cut(layers(256, 64, 16), 16384, 256)) == ["chain"]


def test_three_are_one_kernel_too() -> None:
    found = cut(layers(96, 32, 64, 32), 65536, 96)
    assert kinds(found) == ["chain"]
    assert sum(node.op == "matmul" for node in found.calls[0].task.graph.nodes()) == 3


def test_a_convolution_and_a_pointwise_one_are_one_kernel() -> None:
    model = torch.nn.Sequential(
        torch.nn.Conv2d(48, 48, 3, 2, 1), torch.nn.ReLU(), torch.nn.Conv2d(48, 48, 1), torch.nn.ReLU()
    )
    assert "chain" in kinds(cut(model, 32, 48, 112, 112))


def test_a_window_after_a_convolution_is_not() -> None:
    model = torch.nn.Sequential(torch.nn.Conv2d(48, 48, 1), torch.nn.ReLU(), torch.nn.Conv2d(48, 48, 3, 1, 1))
    assert "chain" not in kinds(cut(model, 32, 48, 56, 56))


def test_an_intermediate_result_that_is_an_output_is_in_memory() -> None:
    found = cut(TwoOutputs(), 16384, 256)
    assert "chain" not in kinds(found) and found.fusion is not None
    (refused,) = found.fusion.refused
    assert refused.reason == "the result between them is an output of the model"
    assert refused.label == "matmul+add+relu+matmul+add+relu" and refused.output == "f16[16384,16]"
    assert str(found.fusion) == "2 groups, the same as greedy fusion; 1 chain has no kernel"


class ReadTwice(torch.nn.Module):
    """Pairs of layers; a softmax reads the result between them too."""

    def __init__(self, pairs: int) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(layers(64, 64) for _ in range(2 * pairs))

    def forward(self, x: Any) -> Any:
        read = []
        for one, two in zip(self.layers[::2], self.layers[1::2], strict=True):
            y = one(x)
            read.append(torch.softmax(y, -1))
            x = torch.softmax(two(y), -1)
        return x, *read


def test_chains_that_one_reason_excludes_are_one_row() -> None:
    found = cut(ReadTwice(3), 16384, 64).fusion
    assert found is not None
    (refused,) = (each for each in found.refused if "read by other kernels too" in each.reason)
    assert refused.calls == 6  # to the next layer and to a softmax, of each pair
    assert refused.layers[0] == "layers.0.0"


def test_a_rule_of_fusion_is_named() -> None:
    """A window reads outside of the first result, so the padding between them has to be in memory."""
    model = torch.nn.Sequential(torch.nn.Conv2d(48, 48, 1), torch.nn.ReLU(), torch.nn.Conv2d(48, 48, 3, 1, 1))
    found = cut(model, 32, 48, 56, 56).fusion
    assert found is not None
    reasons = [refused.reason for refused in found.refused]
    assert "fusion rule: no padding of a contraction's or reduction's result" in reasons


def test_a_norm_stays_apart_from_a_wide_gemm_because_that_is_faster() -> None:
    """Every block of the same rows would compute their statistics again."""
    model = torch.nn.Sequential(torch.nn.LayerNorm(768), torch.nn.Linear(768, 2304))
    found = cut(model, 197, 768)
    assert len(found.calls) == 2 and found.fusion is not None
    (group,) = found.fusion.considered
    assert group.label == "layer_norm+matmul+add" and not group.used and group.gain <= 0


def test_a_chain_with_a_norm_of_columns_is_refused_with_the_reason() -> None:
    """A block of rows does not have whole columns."""
    model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.Softmax(0))
    found = cut(model, 197, 256)
    assert len(found.calls) == 2 and found.fusion is not None and not found.fusion.considered
    reasons = [refused.reason for refused in found.fusion.refused]
    assert reasons == ["the norm does not write its rows one after the other"]


def test_a_convolution_with_groups_is_named_as_one() -> None:
    model = torch.nn.Sequential(
        torch.nn.Conv2d(48, 48, 3, 1, 1, groups=48), torch.nn.ReLU(), torch.nn.Conv2d(48, 48, 1)
    )
    found = cut(model, 1, 48, 56, 56).fusion
    assert found is not None
    assert any("has 48 groups of channels, so it is not one GEMM" in each.reason for each in found.refused)


def test_a_slow_default_program_is_no_alternative() -> None:
    """Two convolutions that are added: only the default program computes both in one kernel."""

    class Branches(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = (torch.nn.Conv2d(64, 64, 1) for _ in range(2))

        def forward(self, x: Any) -> Any:
            return torch.relu(self.one(torch.relu(x)) + self.two(x))

    found = cut(Branches(), 32, 64, 56, 56).fusion
    assert found is not None
    assert all(group.label.count("conv") <= 1 for group in found.considered)


def test_a_chain_that_does_not_fit_on_chip_is_refused_with_the_reason() -> None:
    found = cut(layers(768, 3072, 768), 512, 768)
    assert "chain" not in kinds(found)
    assert found.fusion is not None
    (refused,) = found.fusion.refused
    assert "GEMM 1 has 3072 columns" in refused.reason and refused.label.count("matmul") == 2
    assert refused.layers == ("0", "1", "2", "3")
    assert str(refused).startswith(
        "0 + 1 + 2 + 3, f16[512,768]: GEMM 1 has 3072 columns; a block keeps at most 256 on chip"
    )


def test_without_a_predicted_gain_kernels_stay_separate() -> None:
    """Few rows and a long sum: a block with all columns would leave most multiprocessors without work."""
    found = cut(layers(4096, 256, 256), 64, 4096)
    assert "chain" not in kinds(found) and found.fusion is not None and not found.fusion.refused


def test_strict_numerics_and_greedy_fusion_make_no_chains() -> None:
    assert "chain" not in kinds(cut(layers(256, 64, 16), 16384, 256, numerics="strict"))
    greedy = Cutting("greedy")
    assert "chain" not in kinds(cut(layers(256, 64, 16), 16384, 256, cutting=greedy))


def test_the_calls_compute_the_model() -> None:
    model = layers(24, 16, 8)
    found = cut(model, 8192, 24)
    assert kinds(found) == ["chain"]
    x = torch.randn(8192, 24, dtype=torch.half)
    (got,) = run_calls(found, [x.numpy()])
    expected = model.double()(x.double()).detach().numpy()
    assert abs(got - expected).max() < 1e-2 * abs(expected).max()


class Wide(torch.nn.Module):
    """Two linear layers with more values between them than a core keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(8, 40_000), torch.nn.Linear(40_000, 8)

    def forward(self, x: Any) -> Any:
        return self.second(torch.relu(self.first(x)))


def test_explain_shows_why_a_chain_was_not_fused() -> None:
    """From the partition through the plan and a saved file to the text."""
    model = tilewright.compile(Wide().eval(), (torch.zeros(64, 8),), target="cpu")
    explanation = model.explain(repeats=1)
    lines = str(explanation).splitlines()
    assert max(map(len, lines)) <= 80
    text = " ".join(" ".join(lines).split())
    assert "unfused first + relu + second, f32[64,8]: the results between its GEMMs take at least" in text
    (refused,) = explanation.to_dict()["fusion"]["refused"]
    assert refused["reason"].endswith("that a core keeps") and refused["calls"] == 1


def test_explain_shows_what_a_chain_and_its_parts_take() -> None:
    model = tilewright.compile(layers(64, 128, 64).eval(), (torch.zeros(256, 64),), target="cpu")
    explanation = model.explain(repeats=1)
    assert explanation.fusion is not None
    (row,) = explanation.fusion.considered
    lines = str(explanation).splitlines()
    assert max(map(len, lines)) <= 80
    text = " ".join(" ".join(lines).split())
    assert f"{'fused' if row.used else 'unfused'} 0 + 1 + 2 + 3: {row.alternative}" in text
    assert "matmul+add+relu" in row.alternative and "(predicted)" in row.alternative


def test_explain_shows_few_groups_and_says_how_many_more() -> None:
    model = tilewright.compile(torch.nn.Linear(4, 4).eval(), (torch.zeros(2, 4),), target="cpu")
    groups = tuple(
        GroupReport(
            f"matmul+{n}",
            "f32[1]",
            n % 2 == 0,
            False,
            1e-6 * (n + 1),
            1e-5,
            parts=(PartReport("relu", 1e-5),),
        )
        for n in range(10)
    )
    shown = structs.replace(model.explain(repeats=1), fusion=FusionReport("dynamic", 9, 9, considered=groups))
    text = str(shown)
    assert (
        text.count("us as one kernel") == 6 and text.count("2 more are in the report and in to_dict()") == 2
    )
    assert text.index("matmul+0") < text.index("matmul+2") < text.index("matmul+4") < text.index("matmul+1")
    assert max(map(len, text.splitlines())) <= 80


def test_explain_names_the_layers_that_were_not_fused() -> None:
    model = tilewright.compile(torch.nn.Linear(4, 4).eval(), (torch.zeros(2, 4),), target="cpu")
    named = ("encoder.layer.0.intermediate.dense", "encoder.layer.0.output.dense")
    refused = RefusedGroup("linear+gelu+linear", "f16[512,768]", "too many columns", 12, named)
    shown = structs.replace(model.explain(), fusion=FusionReport("dynamic", 2, 2, refused=(refused,)))
    assert max(map(len, str(shown).splitlines())) <= 80
    assert (
        "encoder.layer.0.intermediate.dense + encoder.layer.0.output.dense (12 times), f16[512,768]: too many columns"
        " (linear+gelu+linear)"
    ) in " ".join(str(shown).split())
