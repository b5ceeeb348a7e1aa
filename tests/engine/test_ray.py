"""Ray starts the ranks of other nodes: a real cluster of two, here on one machine."""

import os
import signal
import tempfile

import pytest
from test_ranks import GREEDY, PROMPTS, SEEDED, family_engine, ids

from quire.types.errors import ConfigError, EngineDead

ray = pytest.importorskip("ray", reason="ray is not installed: pip install 'quire[ray]'")


@pytest.fixture(scope="module")
def cluster():
    """Nodes have addresses of their own, as on two machines."""
    from ray.cluster_utils import Cluster

    with tempfile.TemporaryDirectory(prefix="r") as folder, pytest.MonkeyPatch.context() as patch:
        for name, value in (("RAY_TMPDIR", folder), ("HOME", folder), ("RAY_USAGE_STATS_ENABLED", "0")):
            patch.setenv(name, value)
        small = {"num_cpus": 1, "object_store_memory": 80 << 20}
        made = Cluster(
            initialize_head=True, head_node_args={**small, "node_ip_address": "127.0.0.2", "include_dashboard": False}
        )
        try:
            made.add_node(**small, node_ip_address="127.0.0.3")
            patch.setenv("RAY_ADDRESS", made.address)
            patch.setenv("QUIRE_RAY_NODE_IP", "127.0.0.2")
            yield made
        finally:
            ray.shutdown()
            made.shutdown()


def test_two_nodes_of_a_cluster(checkpoint, cluster):
    directory = checkpoint("llama").directory
    prompts, params = PROMPTS * 2, [GREEDY] * len(PROMPTS) + [SEEDED] * len(PROMPTS)
    expected = ids(family_engine(directory), prompts, params)
    llm = family_engine(directory, tensor_parallel_size=2, distributed_executor_backend="ray")
    assert ids(llm, prompts, params) == expected
    told = llm.collective_rpc("describe_rank")
    assert [rank["rank"] for rank in told] == [0, 1] and told[0]["pid"] == os.getpid()
    os.kill(told[1]["pid"], signal.SIGKILL)
    with pytest.raises(EngineDead, match=r"rank 1 \(on node 1\)"):
        while True:
            ids(llm, PROMPTS, GREEDY)
    llm.llm_engine.shutdown()
    llm = family_engine(directory, pipeline_parallel_size=2, distributed_executor_backend="ray")
    assert ids(llm, prompts, params) == expected
    assert [rank["stage"] for rank in llm.collective_rpc("describe_rank")] == [0, 1]
    llm.llm_engine.shutdown()
    for args, message in (
        ({"tensor_parallel_size": 3}, "3 ranks need a CPU each, .* the nodes of the Ray cluster have 1, 1"),
        ({"tensor_parallel_size": 3, "nnodes": 3}, "nnodes=3, and the Ray cluster has 2"),
        ({"tensor_parallel_size": 2, "data_parallel_size": 2}, "data_parallel_size=2 cannot be had"),
    ):
        with pytest.raises(ConfigError, match=message):
            family_engine(directory, distributed_executor_backend="ray", **args)
