"""Pages in host memory and on disk as viewers see them: the event, `quire top`, the page, and the same numbers in /metrics."""

import threading
import time

import pytest
from browser import Viewer, needs_browser, open_browser
from feed_viewer import watching
from server_process import body, serving

from quire.cli.top import EngineRow, TopFeed, print_lines, tiers
from quire.types.stats import NOTHING, TierCounts, together

SMALL = ("--num-gpu-blocks-override", "30", "--max-model-len", "100", "--block-size", "4", "--max-num-seqs", "2")


@pytest.fixture(scope="module")
def served(serve_model, tmp_path_factory):
    disk = ("--kv-disk-path", str(tmp_path_factory.mktemp("disk")), "--kv-disk-size", "0.01")
    with serving(serve_model, *SMALL, "--kv-offloading-size", "0.01", *disk) as server:
        server.url()
        yield server


def converse(client, count: int = 10) -> None:
    """Ask for answers after few long prompts, which do not fit on the device together."""
    for i in range(count):
        answer = client.post("/v1/completions", json=body(4, False, f"{'abcdefgh'[i % 5]} and some more " * 4))
        assert answer.status_code == 200, answer.text


def metric(client, name: str) -> float:
    lines = [line for line in client.get("/metrics").text.splitlines() if line.startswith(f"quire:{name}{{")]
    return sum(float(line.rpartition(" ")[2]) for line in lines)


def test_the_event_agrees_with_metrics_and_top_shows_it(served):
    with served.client() as client, watching(served.url()) as viewer:
        converse(client)
        viewer.finished(10)
        stats = viewer.settled()
        found = stats["tiers"]
        assert 0 < found["used"] <= found["pages"] and found["failures"] == 0
        assert 0 < found["hits"] <= found["queries"] and found["bytes"]["stored"] >= found["bytes"]["fetched"] > 0
        assert metric(client, "external_prefix_cache_hits_total") == found["hits"]
        assert metric(client, "kv_offload_load_bytes_total") == found["bytes"]["fetched"]
        assert found["rates"].keys() == found["bytes"].keys()
    (line,) = tiers(EngineRow(stats=stats))
    assert f"host memory {found['used']}/{found['pages']}  hits {found['hits'] / found['queries']:.0%}" in line
    assert "fetched" in line and "failures 0" in line


def test_top_without_a_terminal_prints_them_too(served, capsys):
    feed = TopFeed(served.url(), None)
    feed.start()
    printer = threading.Thread(target=print_lines, args=(feed,), daemon=True)
    printer.start()
    printed, end = "", time.monotonic() + 60
    while "  failures 0\n" not in printed and time.monotonic() < end:
        printed += capsys.readouterr().out
        time.sleep(0.02)
    feed.refused = "the test ends"
    feed.wake.set()
    printer.join()
    assert " host memory " in printed and "  failures 0\n" in printed


def test_rates_are_bytes_since_the_event_before():
    from quire.serve.engine_views import TiersView

    view = TiersView()
    assert view.as_event(TierCounts(), 0.0, True) is None
    assert view.as_event(TierCounts(records=9, stored=2, page_bytes=100), 1.0, True)["rates"]["stored"] == 0.0
    event = view.as_event(TierCounts(records=9, stored=7, fetched=1, page_bytes=100), 3.0, True)
    assert event["rates"] == {"stored": 250.0, "fetched": 50.0, "written": 0.0, "read": 0.0}
    (line,) = tiers(EngineRow(stats={"tiers": {**event, "on_disk": 3}}))
    assert "stored 250 B/s  fetched 50 B/s  disk 3" in line
    assert tiers(EngineRow(stats={"tiers": None})) == tiers(EngineRow()) == []


def test_several_engines_add_up():
    import msgspec

    one = msgspec.structs.replace(NOTHING, tier=TierCounts(records=4, used=1, hits=3, page_bytes=64))
    assert together([one, one]).tier == TierCounts(records=8, used=2, hits=6, page_bytes=64)


@needs_browser
def test_the_page_shows_tiers_only_where_there_are_some(served, serve_model):
    with open_browser() as browser, served.client() as client:
        converse(client)
        viewer = Viewer(browser, served.url())
        viewer.wait("feed.state === 'live'")
        viewer.page.click("#views a:has-text('Engine')")
        viewer.wait("view.tiles.host && view.tiles.host.textContent.endsWith('%')")
        assert "of host memory in use" in viewer.page.inner_text("#tiles") and not viewer.errors
        viewer.close()
        with serving(serve_model) as plain:
            other = Viewer(browser, plain.url())
            other.wait("feed.state === 'live'")
            other.page.click("#views a:has-text('Engine')")
            other.wait("view.tiles.running.textContent.startsWith('0')")
            assert "host memory" not in other.page.inner_text("#tiles") and not other.errors
            other.close()
