"""What every test shares: a clean home, threads that yield, hypothesis profiles, skipped GPU tests, golden files."""

from __future__ import annotations

import difflib
import os
import resource
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import hypothesis
import pytest

from tilewright.space import registration

# Before any OpenMP runtime is loaded: the test processes share the cores, and a thread that spins while it waits takes
# them from the others.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# A pass that fails is skipped with a warning in the hands of a user. Here it must not hide.
os.environ.setdefault("TILEWRIGHT_STRICT_PASSES", "on")

# A shell starts background jobs with Ctrl-C ignored; tests of interrupts want it as it is in the foreground.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Compiling takes as long as it takes. In CI the examples are the same on each run, so that a failure can be repeated.
hypothesis.settings.register_profile("local", deadline=None)
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "local")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-goldens", action="store_true", help="write golden files anew instead of comparing"
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if _has_gpu():
        return
    skip = pytest.mark.skip(reason="no NVIDIA GPU here")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


def _has_gpu() -> bool:
    """By its device file: starting the driver would leave a context in a process that may still fork."""
    return any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/dxg").exists()


@pytest.fixture(scope="session", autouse=True)
def clean_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Caches and databases of the tests, and of the processes they start, go to a temporary folder."""
    home = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        for variable in ("XDG_CACHE_HOME", "XDG_DATA_HOME", "XDG_CONFIG_HOME", "XDG_STATE_HOME"):
            folder = home / variable.removeprefix("XDG_").removesuffix("_HOME").lower()
            folder.mkdir()
            patch.setenv(variable, str(folder))
        yield home


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """A test that changes what all tests of a process share fails, not the one that happens to run after it."""
    before = _shared_state()
    yield
    after = _shared_state()
    changed = {name: (before[name], after[name]) for name in before if before[name] != after[name]}
    assert not changed, f"left behind (before, after): {changed}"


def _shared_state() -> dict[str, object]:
    names = [
        name for name in os.environ if name.startswith("TILEWRIGHT_") or name in ("PYTHONPATH", "TMPDIR")
    ]
    kinds = ("RLIMIT_AS", "RLIMIT_CPU", "RLIMIT_FSIZE", "RLIMIT_NOFILE", "RLIMIT_NPROC")
    return {
        "environment": {name: os.environ[name] for name in names},
        "folder": os.getcwd(),
        "handlers": {name: signal.getsignal(getattr(signal, name)) for name in ("SIGINT", "SIGTERM")},
        "limits": {kind: resource.getrlimit(getattr(resource, kind)) for kind in kinds},
        "registering modules": registration.registering_modules(),
    }


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """`golden("conv.txt", text)` compares `text` with `goldens/conv.txt` alongside the test; see --update-goldens."""

    def compare(name: str, text: str) -> None:
        path = request.path.parent / "goldens" / name
        if request.config.getoption("--update-goldens"):
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
            return
        expected = path.read_text() if path.exists() else ""
        if text != expected:
            lines = difflib.unified_diff(
                expected.splitlines(), text.splitlines(), str(path), "now", lineterm=""
            )
            pytest.fail("\n".join((*lines, "if the change is meant: pytest --update-goldens")), pytrace=False)

    return compare
