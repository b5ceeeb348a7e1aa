"""Two nodes on one machine: the engine with its ranks here, others behind TCP. The same tokens, and a lost rank is named."""

import ctypes
import os
import shutil
import signal
import socket
import struct
import sys
import threading

import pytest
from test_ranks import GREEDY, PROMPTS, SEEDED, family_engine, ids

from forked import nursery
from patience import PATIENCE
from quire import LLM, EngineArgs
from quire.cli import headless
from quire.cli.main import main
from quire.engine import agreement, handshake
from quire.engine.executor import nodes, workers
from quire.engine.handshake import own_terms, terms_of
from quire.types.errors import ConfigError, EngineDead, ModelError


@pytest.fixture(scope="module", autouse=True)
def _forked(tmp_path_factory):
    with nursery(tmp_path_factory.mktemp("nursery"), "rank") as command, pytest.MonkeyPatch.context() as patch:
        patch.setattr(workers, "COMMAND", command)
        patch.setattr(nodes, "WORKER", command)
        yield


@pytest.fixture
def port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def run_node(directory, port, node=1):
    """One life of an engine on another node. The node has the model in `directory`."""
    terms = own_terms(EngineArgs(str(directory)))
    return nodes.run_node(("127.0.0.1", port), node, "127.0.0.1", "", PATIENCE, terms)


def run_command(directory, port):
    """`quire serve --headless` as node 1 of 2, in a thread of the test: returns its exit code."""
    where = ["--nnodes", "2", "--node-rank", "1", "--master-addr", "127.0.0.1", "--master-port", str(port)]
    return main(["serve", str(directory), "--headless", "-tp", "2", *where])


@pytest.fixture
def _no_signals(monkeypatch):
    """Only the main thread may set signal handlers."""
    monkeypatch.setattr(headless, "_prepare", lambda: None)


def copied(directory, copy, change=lambda weights: weights):
    shutil.copytree(directory, copy)
    [file] = copy.glob("*.safetensors")
    file.write_bytes(change(file.read_bytes()))
    return copy


def other_weights(data):
    """The same tensors, the last byte of the last one changed."""
    return data[:-1] + bytes([data[-1] ^ 1])


@pytest.mark.usefixtures("_no_signals")
def test_a_node_with_other_weights_is_refused_and_one_with_the_same_gives_the_tokens(
    checkpoint, tmp_path, port, caplog, capsys
):
    directory = checkpoint("llama").directory
    other, same = copied(directory, tmp_path / "other", other_weights), copied(directory, tmp_path / "same")
    expected = ids(family_engine(directory), PROMPTS, GREEDY)
    codes, over = [], []

    def come():
        codes.append(run_command(other, port))
        over.append(run_node(same, port))

    node = threading.Thread(target=come)
    node.start()
    llm = family_engine(directory, tensor_parallel_size=2, nnodes=2, master_port=port)
    assert ids(llm, PROMPTS, GREEDY) == expected
    llm.llm_engine.shutdown()
    node.join(PATIENCE)
    assert codes == [1] and over == [True]
    difference = "its model is not machine 0's: 'weights' is another one"
    assert f"rejected node 1 ('127.0.0.1'): {difference}" in caplog.text
    assert f"node 0 refused this node: {difference}" in capsys.readouterr().err


def test_a_node_with_another_draft_model_is_refused(checkpoint, port, monkeypatch):
    directory = checkpoint("llama").directory
    monkeypatch.setattr(agreement, "draft_files", lambda config: {"weights": "of node 0"})
    node = threading.Thread(target=run_node, args=(directory, port))
    node.start()
    drafts = {"model": str(directory), "num_speculative_tokens": 2}
    with pytest.raises(ModelError, match=r"rank 1 \(on node 1\): the draft model .* is not machine 0's: 'config.json' should"):
        family_engine(directory, tensor_parallel_size=2, nnodes=2, master_port=port, speculative_config=drafts)
    node.join(PATIENCE)


SO_ATTACH_FILTER, DROP_ALL = 26, struct.pack("HBBI", 6, 0, 0, 0)  # Linux; BPF_RET of 0 bytes


def vanish(connection):
    """Acknowledge nothing more and send nothing more, as a machine without power: its peer receives no FIN and no reset."""
    code = ctypes.create_string_buffer(DROP_ALL, len(DROP_ALL))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 0)
    connection.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, struct.pack("HP", 1, ctypes.addressof(code)))


@pytest.mark.skipif(sys.platform != "linux", reason="silences a connection with a socket filter")
@pytest.mark.usefixtures("_no_signals")
def test_a_node_joins_again_when_node_0_vanished_without_closing(checkpoint, monkeypatch):
    """Node 0 vanishes while the node waits for an answer, and again when its ranks run."""
    for name in ("PROBE_AFTER_S", "PROBE_EVERY_S", "UNACKNOWLEDGED_S"):
        monkeypatch.setattr(handshake, name, 1)
    directory, codes = checkpoint("llama").directory, []
    terms, shares = terms_of(EngineArgs(str(directory))), nodes.share_ranks(2, 2)
    with handshake.listen(("127.0.0.1", 0)) as listener:
        node = threading.Thread(target=lambda: codes.append(run_command(directory, listener.getsockname()[1])))
        node.start()
        listener.settimeout(PATIENCE)
        unanswered, _ = listener.accept()
        vanish(unanswered)
        lost = nodes.gather(listener, shares, "", PATIENCE, terms)
        for connection in (*lost.nodes.values(), *lost.controls.values(), *lost.ends[0].values()):
            vanish(connection)
        found = nodes.gather(listener, shares, "", PATIENCE, terms)
        nodes.NodeConnection(1, found.nodes[1]).close()
        node.join(PATIENCE)
        for one in (unanswered, lost, found):
            one.close()
    assert codes == [0]


def test_two_nodes_give_the_tokens_of_one_process(checkpoint, port):
    directory = checkpoint("llama").directory
    prompts, params = PROMPTS * 2, [GREEDY] * len(PROMPTS) + [SEEDED] * len(PROMPTS)
    expected = ids(family_engine(directory), prompts, params)
    over = []
    other = threading.Thread(target=lambda: over.append(run_node(directory, port)))
    other.start()
    llm = family_engine(directory, tensor_parallel_size=3, nnodes=2, master_port=port)
    assert ids(llm, prompts, params) == expected
    told = llm.collective_rpc("describe_rank")
    assert [rank["rank"] for rank in told] == [0, 1, 2]
    llm.llm_engine.shutdown()
    other.join(PATIENCE)
    assert over == [True], "the node was told that it is over"


@pytest.mark.parametrize(("ranks", "stages", "machines"), [(1, 2, 2), (2, 2, 4)])
def test_stages_on_several_nodes(checkpoint, port, ranks, stages, machines):
    """Also where the ranks of a stage are on several."""
    directory = checkpoint("llama").directory
    prompts, params = PROMPTS * 2, [GREEDY] * len(PROMPTS) + [SEEDED] * len(PROMPTS)
    expected = ids(family_engine(directory), prompts, params)
    over = []
    others = [
        threading.Thread(target=lambda node=node: over.append(run_node(directory, port, node))) for node in range(1, machines)
    ]
    for other in others:
        other.start()
    size = {"tensor_parallel_size": ranks, "pipeline_parallel_size": stages, "nnodes": machines}
    llm = family_engine(directory, master_port=port, **size)
    assert ids(llm, prompts, params) == expected
    assert [rank["stage"] for rank in llm.collective_rpc("describe_rank")] == [n for n in range(stages) for _ in range(ranks)]
    llm.llm_engine.shutdown()
    for other in others:
        other.join(PATIENCE)
    assert over == [True] * len(others)


@pytest.mark.parametrize(
    ("how", "size", "fate"),
    [
        (signal.SIGKILL, "tensor_parallel_size", r"rank 1 \(on node 1\)"),
        (signal.SIGSTOP, "pipeline_parallel_size", r"rank 1 \(stage 1, on node 1\) is stopped"),
    ],
)
def test_a_lost_rank_of_another_node_is_named(checkpoint, port, how, size, fate):
    over, started, directory = [], [], checkpoint("llama").directory

    def run_node():
        terms = own_terms(EngineArgs(str(directory)))
        ranks = nodes.NodeRanks(nodes.join(("127.0.0.1", port), 1, "127.0.0.1", "", PATIENCE, terms))
        started.append(ranks.processes[1].pid)
        over.append(ranks.watch())
        ranks.end()

    other = threading.Thread(target=run_node)
    other.start()
    llm = family_engine(directory, **{size: 2}, nnodes=2, master_port=port)
    pid = llm.collective_rpc("describe_rank")[1]["pid"]
    for one in {pid, *started}:  # the nursery's process, and the one that stands for it
        os.kill(one, how)
    with pytest.raises(EngineDead, match=fate):
        while True:
            ids(llm, PROMPTS, GREEDY)
    llm.llm_engine.shutdown()
    other.join(PATIENCE)
    if how == signal.SIGSTOP:
        os.kill(pid, signal.SIGKILL)
    assert over == [False], "another engine may be started, and wants it"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"nnodes": 2}, "nnodes=2 machines need as many ranks, and there are 1"),
        ({"nnodes": 2, "node_rank": 1, "tensor_parallel_size": 2}, "run quire serve with --headless on this machine"),
        ({"nnodes": 2, "tensor_parallel_size": 2, "data_parallel_size": 2}, "data_parallel_size=2 is not supported"),
    ],
)
def test_what_cannot_be_had(checkpoint, args, message):
    with pytest.raises(ConfigError, match=message):
        LLM(str(checkpoint("llama").directory), skip_tokenizer_init=True, device="cpu", **args)


def test_headless_is_for_other_machines(capsys):
    assert main(["serve", "x", "--headless"]) == 2
    assert "--headless is for machines 1 to nnodes - 1" in capsys.readouterr().err
