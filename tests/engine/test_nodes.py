"""Two nodes on one machine: the engine with its ranks here, others behind TCP. The same tokens, and a lost rank is named."""

import os
import signal
import socket
import threading

import pytest
from test_ranks import GREEDY, PROMPTS, SEEDED, family_engine, ids

from forked import nursery
from patience import PATIENCE
from quire import LLM
from quire.cli.main import main
from quire.engine.executor import nodes, workers
from quire.types.errors import ConfigError, EngineDead


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


def test_two_nodes_give_the_tokens_of_one_process(checkpoint, port):
    directory = checkpoint("llama").directory
    prompts, params = PROMPTS * 2, [GREEDY] * len(PROMPTS) + [SEEDED] * len(PROMPTS)
    expected = ids(family_engine(directory), prompts, params)
    over = []
    other = threading.Thread(target=lambda: over.append(nodes.run_node(("127.0.0.1", port), 1, "127.0.0.1", "", PATIENCE)))
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
    first, over = ("127.0.0.1", port), []
    others = [
        threading.Thread(target=lambda node=node: over.append(nodes.run_node(first, node, "127.0.0.1", "", PATIENCE)))
        for node in range(1, machines)
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
    over, started = [], []

    def run_node():
        ranks = nodes.NodeRanks(nodes.join(("127.0.0.1", port), 1, "127.0.0.1", "", PATIENCE))
        started.append(ranks.processes[1].pid)
        over.append(ranks.watch())
        ranks.end()

    other = threading.Thread(target=run_node)
    other.start()
    llm = family_engine(checkpoint("llama").directory, **{size: 2}, nnodes=2, master_port=port)
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
        ({"nnodes": 2, "node_rank": 1, "tensor_parallel_size": 2}, "run quire serve with --headless here"),
        ({"nnodes": 2, "tensor_parallel_size": 2, "data_parallel_size": 2}, "data_parallel_size=2 cannot be had"),
    ],
)
def test_what_cannot_be_had(checkpoint, args, message):
    with pytest.raises(ConfigError, match=message):
        LLM(str(checkpoint("llama").directory), skip_tokenizer_init=True, device="cpu", **args)


def test_headless_is_for_other_machines(capsys):
    assert main(["serve", "x", "--headless"]) == 2
    assert "--headless is for machines 1 to nnodes - 1" in capsys.readouterr().err
