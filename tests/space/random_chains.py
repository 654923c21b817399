"""Random chains of contractions, and contractions between norms, as CUDA text on the emulated GPU, each with a random
config, against the oracle.

    python -m tests.space.random_chains 40 [--seed 0]

Every second one has a norm.
Counts how often each kind of chain and each knob value was taken, and fails if one never was. A failure names its seed.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path
from random import Random

from tests.programs import GPU, validation
from tests.space.chains import Case, NormCase, random_case, random_norms
from tilewright.codegen.cuda.tensor import tensor_source
from tilewright.loops.gpu.chain import TensorChain
from tilewright.loops.gpu.tensor import TensorGemm, WindowOperand
from tilewright.measure.validation import WrongResult
from tilewright.space.space import Config
from tilewright.space.template import GpuWork
from tilewright.space.templates.cuda.chain import TensorCoreChain
from tilewright.space.templates.cuda.norms import TensorCoreNorm
from tilewright.testing.emulator.run import Complaint, check

_CASES = 6  # inputs of each chain
WANTED = (
    *(
        "registers",
        "shared",
        "persistent",
        "one tile a block",
        "two products",
        "three products",
        "rows",
        "windows",
    ),
    *("weights of k", "weights of n", "one warp a row", "several warps a row", "single elements", "vectors"),
    *("a norm before", "a norm after", "layer_norm", "rms_norm", "softmax", "split", "more rows than a tile"),
)


def features(case: Case, config: Config, kernel: TensorChain) -> list[str]:
    values = dict(config.values)
    return [
        str(values["resident"]),
        "persistent" if values["persistent"] else "one tile a block",
        "three products" if len(kernel.followers) == 2 else "two products",
        "windows" if isinstance(kernel.first.a, WindowOperand) else "rows",
        "weights of n" if kernel.followers[0].b.transposed else "weights of k",
        "one warp a row" if values["warps_n"] == 1 else "several warps a row",
        "single elements" if min(each.b.lanes for each in kernel.followers) == 1 else "vectors",
    ]


def features_of_norms(case: NormCase, config: Config, kernel: TensorGemm) -> list[str]:
    return [
        *(["a norm before"] if kernel.statistics is not None else []),
        *(["a norm after"] if kernel.normalised is not None else []),
        *(norm for norm in (case.before, case.after) if norm),
        *(["split"] if kernel.tiles.split > 1 else []),
        *(["more rows than a tile"] if case.rows > kernel.tiles.bm else []),
    ]


def checked(seed: int) -> list[str]:
    """What a random chain with a random config is; raises WrongResult or Complaint if it is wrong."""
    rng = Random(seed)
    if seed % 2:
        return checked_norms(rng)
    case = random_case(rng)
    task = case.task()
    few = replace(
        GPU, sms=rng.choice((1, 4, GPU.sms))
    )  # persistent blocks need more tiles than multiprocessors
    applied = TensorCoreChain().apply(GpuWork(task, few))
    assert applied is not None, case.name
    config = applied.space.sample(rng)
    assert config is not None, case.name
    kernel = applied.program(config)
    assert isinstance(kernel, TensorChain)
    with tempfile.TemporaryDirectory() as folder:
        check(tensor_source(kernel), validation(task, "fast")[:_CASES], Path(folder))
    return features(case, config, kernel)


def checked_norms(rng: Random) -> list[str]:
    """The same for a contraction between norms."""
    case = random_norms(rng)
    task = case.task()
    applied = TensorCoreNorm().apply(GpuWork(task, GPU))
    assert applied is not None, case.name
    config = applied.space.sample(rng)
    assert config is not None, case.name
    kernel = applied.program(config)
    assert isinstance(kernel, TensorGemm)
    with tempfile.TemporaryDirectory() as folder:
        check(tensor_source(kernel), validation(task, "fast")[:_CASES], Path(folder))
    return features_of_norms(case, config, kernel)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("count", type=int)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    taken: Counter[str] = Counter()
    failures = 0
    for seed in range(options.seed, options.seed + options.count):
        try:
            taken.update(checked(seed))
        except (WrongResult, Complaint) as error:
            failures += 1
            print(f"seed {seed}: {type(error).__name__}: {error}", flush=True)
    for name in WANTED:
        print(f"{taken[name]:6} {name}")
    never = [name for name in WANTED if not taken[name]]
    print(
        f"{options.count} chains, {failures} wrong" + (f"; never taken: {', '.join(never)}" if never else "")
    )
    sys.exit(bool(failures or never))


if __name__ == "__main__":
    main()
