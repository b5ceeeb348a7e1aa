"""Ray starts the ranks of other nodes: a real cluster of two, here on one machine."""

import json
import logging
import os
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from test_ranks import GREEDY, PROMPTS, SEEDED, family_engine, ids
from tiny import TEXT

from patience import PATIENCE, wait_for
from quire import SamplingParams
from quire.engine.executor import ray_nodes
from quire.types.errors import ConfigError, EngineDead, EngineError
from serving import NAME, Running

ray = pytest.importorskip("ray", reason="ray is not installed: pip install 'quire[ray]'")

SMALL = {"num_cpus": 1, "object_store_memory": 80 << 20}
ON_RAY = {"tensor_parallel_size": 2, "distributed_executor_backend": "ray"}


@pytest.fixture(scope="module")
def cluster():
    """Nodes have addresses of their own, as on two machines."""
    from ray.cluster_utils import Cluster

    with tempfile.TemporaryDirectory(prefix="r") as folder, pytest.MonkeyPatch.context() as patch:
        for name, value in (("RAY_TMPDIR", folder), ("HOME", folder), ("RAY_USAGE_STATS_ENABLED", "0")):
            patch.setenv(name, value)
        head = {**SMALL, "node_ip_address": "127.0.0.2", "include_dashboard": False}
        made = Cluster(initialize_head=True, head_node_args=head)
        try:
            made.add_node(**SMALL, node_ip_address="127.0.0.3")
            patch.setenv("RAY_ADDRESS", made.address)
            patch.setenv("QUIRE_RAY_NODE_IP", "127.0.0.2")
            yield made
        finally:
            ray.shutdown()
            made.shutdown()


class Bell(logging.Handler):
    """Calls back at the first record that a start waits for nodes."""

    def __init__(self, call):
        super().__init__()
        self._call = call

    def emit(self, record):
        if self._call is not None and "waiting for Ray nodes" in record.getMessage():
            call, self._call = self._call, None
            call()


def generate_in_task(directory):
    """In a Ray task whose placement group has every CPU of the cluster."""
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    def generate():
        from test_ranks import GREEDY, PROMPTS, family_engine, ids

        with family_engine(directory, **ON_RAY) as llm:
            return ids(llm, PROMPTS, GREEDY)

    group = placement_group([{"CPU": 1}, {"CPU": 1}], strategy="STRICT_SPREAD")
    assert group.wait(PATIENCE), "no deleted LLM keeps CPUs"
    first = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0)
    paths = {"env_vars": {"PYTHONPATH": os.pathsep.join(sys.path)}}
    answer = ray.get(ray.remote(generate).options(num_cpus=1, scheduling_strategy=first, runtime_env=paths).remote())
    remove_placement_group(group)
    return answer


def test_two_nodes_of_a_cluster(checkpoint, cluster, monkeypatch):
    directory = checkpoint("llama").directory
    for args, message in (
        ({"tensor_parallel_size": 3}, "3 ranks require a CPU each, .* the nodes of the Ray cluster have 1, 1"),
        ({"tensor_parallel_size": 3, "nnodes": 3}, "nnodes=3, and the Ray cluster has 2"),
        ({"tensor_parallel_size": 2, "data_parallel_size": 2}, "data_parallel_size=2 is not supported"),
    ):
        with pytest.raises(ConfigError, match=message):
            family_engine(directory, distributed_executor_backend="ray", **args)
    with monkeypatch.context() as patch:
        patch.setattr(ray_nodes, "terms_of", lambda args: ray_nodes.own_terms(args) | {"version": "other"})
        with pytest.raises(EngineError, match=r"node 1 \(127.0.0.3\) could not start .* refused this node: its Quire is"):
            family_engine(directory, **ON_RAY)

    prompts, params = PROMPTS * 2, [GREEDY] * len(PROMPTS) + [SEEDED] * len(PROMPTS)
    expected = ids(family_engine(directory), prompts, params)
    llm = family_engine(directory, **ON_RAY)
    assert ids(llm, prompts, params) == expected
    told = llm.collective_rpc("describe_rank")
    assert [rank["rank"] for rank in told] == [0, 1] and told[0]["pid"] == os.getpid()

    cluster.remove_node(cluster.worker_nodes.copy().pop(), allow_graceful=True)  # the cluster notices it at once
    with pytest.raises(EngineDead, match=r"rank 1 \(on node 1\)"):
        while True:
            ids(llm, PROMPTS, GREEDY)
    del llm
    logger = logging.getLogger("quire.engine.executor.ray_nodes")
    bell = Bell(lambda: cluster.add_node(**SMALL, node_ip_address="127.0.0.3"))
    logger.addHandler(bell)
    try:
        llm = family_engine(directory, pipeline_parallel_size=2, distributed_executor_backend="ray")
    finally:
        logger.removeHandler(bell)
    assert ids(llm, prompts, params) == expected
    assert [rank["stage"] for rank in llm.collective_rpc("describe_rank")] == [0, 1]
    with pytest.raises(EngineError, match=r"within engine_start_timeout: 3 ranks require a CPU each, .* cluster have 1, 1"):
        family_engine(directory, tensor_parallel_size=3, distributed_executor_backend="ray", engine_start_timeout=1.0)
    with pytest.raises(EngineError, match=r"within engine_start_timeout: ranks need a free CPU each .* 0 CPUs .* are free"):
        family_engine(directory, **ON_RAY, engine_start_timeout=1.0)
    del llm
    assert generate_in_task(str(directory)) == expected[: len(PROMPTS)]


def test_a_stream_outlives_a_lost_node_that_is_replaced_late(tiny_model, shared_llm, cluster, capfd):
    """One restart waits for the node; none is spent while the cluster is short of it."""
    params = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)
    [alone] = shared_llm.generate(TEXT[0], params, use_tqdm=False)
    served = Running(tiny_model, quick=False, max_engine_restarts=1, **ON_RAY)
    body = {"model": NAME, "prompt": TEXT[0], "max_tokens": 200, "temperature": 0, "ignore_eos": True, "stream": True}
    begun = threading.Event()

    def read():
        text = ""
        with served.http.stream("POST", "/v1/completions", json=body, timeout=PATIENCE) as response:
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
                    begun.set()
        return text

    def waits():
        return "waiting for Ray nodes" in capfd.readouterr().err

    try:
        with ThreadPoolExecutor(1) as readers:
            reading = readers.submit(read)
            assert begun.wait(PATIENCE)
            cluster.remove_node(cluster.worker_nodes.copy().pop(), allow_graceful=True)
            wait_for(waits)
            cluster.add_node(**SMALL, node_ip_address="127.0.0.3")
            assert reading.result(PATIENCE) == alone.outputs[0].text
        assert served.llm.last_loss.startswith("rank 1 (on node 1) is gone")
    finally:
        served.close()
