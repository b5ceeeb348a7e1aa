import contextlib
import gc
import os
import signal
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# speed is never asserted: a busy machine must not fail a property test. The same examples in every run, others if asked for
EXPLORING = "QUIRE_EXAMPLES" in os.environ or os.environ.get("QUIRE_MATRIX") == "all"
settings.register_profile("quire", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=not EXPLORING)
settings.load_profile("quire")
if not EXPLORING:  # Hypothesis also tries constants of the modules that are imported, which depend on the order of tests
    with contextlib.suppress(ImportError, AttributeError):  # another version
        from hypothesis.internal.conjecture import providers

        providers._get_local_constants = lambda: providers._local_constants  # none
os.environ.setdefault("OMP_NUM_THREADS", "1")  # the models are tiny: threads would only wait for each other
# what takes long comes first: no process is to be left with it at the end. Files of more than 20 s (processor time, or waiting)
LONG_FILES = (
    "test_ray", "test_page", "test_data_parallel", "test_launch", "test_lost_grammars", "test_quantized",
    "test_triton_attention", "test_run_batch", "test_families_served", "test_release", "test_structured_served",
    "test_pooling_losses", "test_fronts", "test_recurrent", "test_matrix", "test_ranks", "test_supervisor",
    "test_group_ranks", "test_speculation", "test_lost_stages", "test_lost_ranks", "test_docs", "test_page_conversations",
    "test_families", "test_workloads", "test_stages_speculation", "test_latent_fixed_order", "test_example_plugin",
    "test_served_models_stay", "test_families_offline", "test_hostile_bodies", "test_feed", "test_shard", "test_losses",
    "test_schemas", "test_default_model_served", "test_tools_served",
)  # fmt: skip
LONG_DIRECTORIES = ("e2e", "engine", "serve", "ops", "models", "prepare", "sched")


def pytest_configure(config: pytest.Config) -> None:
    """Without a GPU, kernels run in Triton's interpreter. This must be chosen before any test imports Triton."""
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):  # not the process that only starts workers
        import torch

        if not torch.cuda.is_available():
            os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_sessionstart(session: pytest.Session) -> None:
    """Of several processes that run all tests, each compiles a part of them first, for pytest rewrites every assertion: side by
    side, each would find nothing done by another."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a shell's background jobs; tests interrupt themselves
        signal.signal(signal.SIGINT, signal.default_int_handler)
    number, tests = os.environ.get("PYTEST_XDIST_WORKER", "")[2:], Path(__file__).parent
    if not number or sys.dont_write_bytecode or tests not in [Path(argument).resolve() for argument in session.config.args]:
        return
    with contextlib.suppress(ImportError, AttributeError, KeyError, TypeError, SyntaxError):  # a pytest that does it otherwise
        from _pytest.assertion import rewrite

        state = session.config.stash[rewrite.assertstate_key]
        for file in sorted(tests.rglob("test_*.py"))[int(number) :: int(os.environ["PYTEST_XDIST_WORKER_COUNT"])]:
            compiled = rewrite.get_cache_dir(file) / (file.stem + rewrite.PYC_TAIL)
            if rewrite._read_pyc(file, compiled) is None and rewrite.try_makedirs(compiled.parent):
                about, code = rewrite._rewrite_test(file, session.config)
                rewrite._write_pyc(state, code, about, compiled)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    ranks = {name: rank for rank, name in enumerate((*LONG_FILES, *LONG_DIRECTORIES))}
    items.sort(key=lambda item: min(ranks.get(name, len(ranks)) for name in (item.path.stem, item.path.parent.name)))
    wanting = [item for item in items if item.get_closest_marker("gpu")]
    if wanting:
        import torch

        if not torch.cuda.is_available():
            for item in wanting:
                item.add_marker(pytest.mark.skip(reason="there is no CUDA device"))


@pytest.fixture(scope="module", autouse=True)
def _put_aside():
    """Keep the objects of imports and earlier modules out of garbage collections, which every engine runs when it opens and
    closes. Engines in this process keep the library code that only a start runs: hundreds of them start here."""
    gc.collect()
    gc.freeze()
    if (torch := sys.modules.get("torch")) is not None:
        torch.manual_seed(0)  # random numbers do not depend on the files that ran before
    if (autotune := sys.modules.get("quire.device.cpu.autotune")) is not None:
        autotune.choose.cache_clear()  # a test with a cache directory of its own has made another choice
    if (prepare := sys.modules.get("quire.device.cpu.prepare")) is not None:
        prepare.give_back_memory = gc.collect
    if (order := sys.modules.get("quire.ops.order")) is not None:
        order.use_order(False)  # the engine of another file may have set the fixed order


def pytest_sessionfinish() -> None:
    gc.unfreeze()  # libraries count what is left at the end, and complain


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Tests that need a browser and find none say so where nobody overlooks it."""
    skipped = [report.longrepr for report in terminalreporter.stats.get("skipped", ())]
    reasons = {reason[2] for reason in skipped if isinstance(reason, tuple)}
    for reason in (reason for reason in reasons if "NO BROWSER" in reason):
        terminalreporter.write_line(reason, red=True, bold=True)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """checkpoint(name) -> the family's tiny checkpoint, made by transformers once for all processes of a run."""
    from oracle import FALLBACK, FAMILIES, Checkpoint, make_checkpoint, open_checkpoint
    from recomputed_families import RECOMPUTED
    from recurrent_families import RECURRENT

    made: dict[str, Checkpoint] = {}
    own = tmp_path_factory.getbasetemp()
    common = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "checkpoints"
    common.mkdir(exist_ok=True)

    def get(name: str) -> Checkpoint:
        if name not in made:
            directory = common / name
            if not directory.exists():
                fresh = tmp_path_factory.mktemp(name)
                make_checkpoint((FAMILIES | FALLBACK | RECURRENT | RECOMPUTED)[name], fresh)
                with contextlib.suppress(OSError):  # another process was first
                    fresh.rename(directory)
            made[name] = open_checkpoint(directory)
        return made[name]

    return get


@pytest.fixture(scope="module")
def quick():
    """Engine processes are forked (quick_engines.py)."""
    from quick_engines import quick_engines

    with quick_engines():
        yield


@pytest.fixture
def packages(tmp_path_factory, monkeypatch):
    """packages.add(name, entry points, code): install packages with plug-ins (plugin_packages.py)."""
    from plugin_packages import Packages

    found = Packages(tmp_path_factory.mktemp("packages"), monkeypatch)
    yield found
    found.forget()
