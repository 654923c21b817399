"""Whether the programs of sketches mean the expressions of their task; on thousands of random tasks, as a command:

python -m tests.space.sketches.meaning --graphs 1000 --seed 0
"""

from __future__ import annotations

import argparse
import random
from collections import Counter
from collections.abc import Iterator

import numpy as np
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from tests.fuzz.whole_pipeline import examples
from tests.rewrites.helpers import array
from tests.space.checked import same_on_two_threads, stored_for
from tests.te.bounds import assert_within_bounds
from tilewright.graph.lower import lower_graph
from tilewright.graph.task import Task
from tilewright.graph.text import print_graph
from tilewright.hw import host
from tilewright.loops.interpret import interpret_program
from tilewright.space.sketches import derive
from tilewright.space.space import Config
from tilewright.space.template import Applied, Work
from tilewright.support.trace import Trace
from tilewright.targets.cpu import CpuTarget
from tilewright.targets.target import computed
from tilewright.te.interpret import interpret
from tilewright.testing.targets import as_model


def check_meaning(applied: Applied, config: Config, task: Task, *, native: bool = True) -> None:
    """The config's program computes what the expressions say, on one thread and on two; AssertionError otherwise."""
    program = applied.program(config)
    output, inputs = lower_graph(task.graph)
    arrays = [array(*node.shape, seed=n, dtype=node.dtype) for n, node in enumerate(task.graph.inputs)]
    with np.errstate(all="ignore"):
        expected = interpret(output, dict(zip(inputs, arrays, strict=True)))
    stored = stored_for(program, arrays)
    if native:
        result = same_on_two_threads(program, stored, numerics="strict", because=str(config))
    else:
        with np.errstate(all="ignore"):
            result = interpret_program(program, stored)
    result = result.reshape(expected.shape)
    if not output.dtype.is_float:
        np.testing.assert_array_equal(result, expected, err_msg=str(config))
        return
    assert_within_bounds(result, output, dict(zip(inputs, arrays, strict=True)), str(config))


def some_configs(task: Task, rng: random.Random, count: int) -> Iterator[tuple[Applied, Config]]:
    """Of every sketch of the task so many configs."""
    for applied in derive(Work(task, host())):
        for _ in range(count):
            config = applied.space.sample(rng)
            if config is not None:
                yield applied, config


def run(count: int, start: int) -> Counter[str]:
    """AssertionError, after shrinking, at the first task of which a sketch is wrong. How often each sketch was met."""
    met: Counter[str] = Counter()

    @seed(start)
    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        print_blob=False,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
    )
    @given(examples, st.integers(0, 1000))
    def check(example: object, number: int) -> None:
        partition = CpuTarget(host()).partition(as_model(example.graph), "fast", Trace.off())
        for task, _ in computed(partition).values():
            for applied, config in some_configs(task, random.Random(number), 1):
                met[config.template] += 1
                try:
                    check_meaning(applied, config, task, native=number % 4 == 0)
                except Exception as error:
                    raise AssertionError(f"{config}\n{print_graph(task.graph)}\n{error}") from error

    check()
    return met


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--graphs", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    met = run(options.graphs, options.seed)
    for name, times in met.most_common():
        print(f"{times:6} {name}")
    print(f"{options.graphs} graphs, {met.total()} configs, no mismatch")


if __name__ == "__main__":
    main()
