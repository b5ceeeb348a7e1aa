"""Ray starts the ranks of other nodes: a real cluster of two, here on one machine."""

import json
import logging
import os
import signal
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from test_ranks import GREEDY, PROMPTS, SEEDED, family_engine, ids
from tiny import TEXT, open_model

from patience import PATIENCE, wait_for
from quire import LLM, EngineArgs, SamplingParams
from quire.engine.executor import ray_gpus, ray_nodes
from quire.engine.ray_engines import passed_on
from quire.types.errors import ConfigError, EngineDead, EngineError
from serving import NAME, Running

ray = pytest.importorskip("ray", reason="ray is not installed: pip install 'quire[ray]'")

SMALL = {"num_cpus": 1, "num_gpus": 1, "object_store_memory": 80 << 20}  # Ray does not look for the GPU
ON_RAY = {"tensor_parallel_size": 2, "distributed_executor_backend": "ray"}


@pytest.fixture(scope="module")
def cluster():
    """Nodes have addresses of their own, as on two machines."""
    from ray.cluster_utils import Cluster

    with tempfile.TemporaryDirectory(prefix="r") as folder, pytest.MonkeyPatch.context() as patch:
        for name, value in (
            ("RAY_TMPDIR", folder), ("HOME", folder), ("RAY_USAGE_STATS_ENABLED", "0"),
            ("RAY_worker_niceness", "0"),  # 15 by default: on a busy machine its ranks would get hardly any of a core
        ):  # fmt: skip
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


def generate_in_task(directory, cpus, **args):
    """In a Ray task whose placement group has CPUs. Return the tokens, and by engine the nodes of its ranks."""
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    def generate():
        from test_ranks import GREEDY, PROMPTS, family_engine, ids

        with family_engine(directory, distributed_executor_backend="ray", **args) as llm:
            return ids(llm, PROMPTS, GREEDY), llm.collective_rpc("describe_rank")

    group = placement_group([{"CPU": 1}] * cpus)
    assert group.wait(PATIENCE), "no deleted LLM keeps CPUs"
    first = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0)
    paths = {"env_vars": {"PYTHONPATH": os.pathsep.join(sys.path)}}
    try:
        return ray.get(ray.remote(generate).options(num_cpus=1, scheduling_strategy=first, runtime_env=paths).remote())
    finally:
        remove_placement_group(group)


def test_two_nodes_of_a_cluster(checkpoint, cluster, monkeypatch):
    directory = checkpoint("llama").directory
    for args, message in (
        ({"tensor_parallel_size": 3}, "3 ranks require a CPU each, .* the nodes of the Ray cluster have 1, 1"),
        ({"tensor_parallel_size": 3, "nnodes": 3}, "nnodes=3, and the Ray cluster has 2"),
        ({"tensor_parallel_size": 2, "data_parallel_size": 2}, "requires that Ray starts the engines, too"),
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
    assert generate_in_task(str(directory), 2, tensor_parallel_size=2)[0] == expected[: len(PROMPTS)]


OVER_RAY = {"data_parallel_size": 2, "data_parallel_backend": "ray"}


def test_engines_in_a_placement_group_have_ranks_on_several_nodes(checkpoint, cluster):
    """Two bundles of the group are on one node, the others on a node each."""
    directory = str(checkpoint("llama").directory)
    more = cluster.add_node(**SMALL | {"num_cpus": 2}, node_ip_address="127.0.0.4")
    try:
        found, ranks = generate_in_task(directory, 4, tensor_parallel_size=2, **OVER_RAY)
    finally:
        cluster.remove_node(more, allow_graceful=True)
    assert found == ids(family_engine(directory), PROMPTS, GREEDY)
    assert [rank["rank"] for rank in ranks] == [0, 1, 0, 1]


def placed():
    """The states of all placement groups, and of all actors of engines."""
    from ray._private.state import actors
    from ray.util.placement_group import placement_group_table

    agents = [actor["State"] for actor in actors().values() if actor["ActorClassName"] == "_Agent"]
    return {entry["state"] for entry in placement_group_table().values()}, set(agents)


def parent_of(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_engines_on_every_node_of_a_cluster(tiny_model, shared_llm, cluster, monkeypatch):
    """One server: its engines give the tokens of one, are replaced with their actors, and leave nothing in the cluster."""
    for args, message in (
        ({"data_parallel_size": 3}, r"=3 requires 1 CPU on one node for each engine; the nodes of the Ray cluster have 1, 1"),
        ({"data_parallel_size": 2, "tensor_parallel_size": 2}, "2 CPUs on one node .* or set distributed_executor_backend=ray"),
        ({"data_parallel_size": 2, "data_parallel_size_local": 2}, "which has 1 of the 1, 1 CPUs of the cluster"),
    ):
        with pytest.raises((ConfigError, EngineError), match=message):  # a cluster that lost a node may grow again
            open_model(tiny_model, **OVER_RAY | args, engine_start_timeout=3.0)
    params = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)
    [alone] = shared_llm.generate(TEXT[0], params, use_tqdm=False)
    served = Running(tiny_model, quick=False, **OVER_RAY)
    engines = served.llm.engines
    body = {"model": NAME, "prompt": TEXT[0], "max_tokens": 200, "temperature": 0, "ignore_eos": True}

    def ask(engine):
        answer = served.http.post("/v1/completions", json=body, headers={"X-data-parallel-rank": str(engine)}, timeout=PATIENCE)
        return answer.json()["choices"][0]["text"]

    try:
        agents = [parent_of(engine.pid) for engine in engines]
        assert len(set(agents)) == 2 and os.getpid() not in agents
        with ThreadPoolExecutor(2) as asking:
            for number, lost in enumerate((engines[0].pid, agents[1])):
                answers = [asking.submit(ask, engine) for engine in (0, 1)]
                wait_for(lambda own=number, answer=answers[number]: engines[own].num_open or answer.done())
                os.kill(lost, signal.SIGKILL)
                assert [answer.result(PATIENCE) for answer in answers] == [alone.outputs[0].text] * 2
                wait_for(lambda own=number: engines[own].restarts == 1 and engines[own].state == "ready")
        assert [engine.restarts for engine in engines] == [1, 1] and parent_of(engines[1].pid) != agents[1]
        with pytest.raises(EngineError, match=r"engine_start_timeout: .* without a place: 0, 1; 0 CPUs are free"):
            open_model(tiny_model, **OVER_RAY, engine_start_timeout=2.0)
        pids = [engine.pid for engine in engines]
    finally:
        served.close()
    wait_for(lambda: placed() == ({"REMOVED"}, {"DEAD"}))
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))


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


# ---- on GPUs

VISIBLE, SHARE = "CUDA_VISIBLE_DEVICES", "QUIRE_CUDA_RANKS"


def on_gpus(ranks, **more):
    return EngineArgs("model", device="cuda", tensor_parallel_size=ranks, distributed_executor_backend="ray", **more)


@pytest.fixture
def _own_environment(monkeypatch):
    for name in (VISIBLE, SHARE, ray_gpus.PART):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


@pytest.mark.usefixtures("_own_environment")
def test_every_rank_gets_a_gpu_of_the_cluster(cluster, monkeypatch):
    ray_gpus.reserve_gpus(on_gpus(2))
    found = ray_gpus.take_reservation()
    assert (found.shares, found.variables) == ([range(1), range(1, 2)], [{VISIBLE: "0"}, {VISIBLE: "0"}])
    assert os.environ[VISIBLE] == "0" and found.nodes[0]["NodeManagerAddress"] == "127.0.0.2"
    with pytest.raises(EngineError, match=r"within engine_start_timeout: ranks need a free GPU each .*; 0 GPUs of .* are free"):
        ray_gpus.reserve_gpus(on_gpus(2, engine_start_timeout=1.0))
    found.release()
    too_many = r"3 ranks require a GPU each, the first .* the nodes of the Ray cluster have 1, 1"
    with pytest.raises((ConfigError, EngineError), match=too_many):  # a cluster that lost a node in another test may grow again
        ray_gpus.reserve_gpus(on_gpus(3, engine_start_timeout=1.0))
    with pytest.raises(ConfigError, match="ranks on GPUs require GPUs of the Ray cluster"):
        ray_gpus.take_reservation()

    monkeypatch.setenv(ray_gpus.PART, "0.5")
    ray_gpus.reserve_gpus(on_gpus(3, engine_start_timeout=PATIENCE))
    found = ray_gpus.take_reservation()
    assert found.shares == [range(2), range(2, 3)]
    assert found.variables == [{VISIBLE: "0", SHARE: "1"}] * 2
    found.release()
    monkeypatch.setenv(ray_gpus.PART, "2")
    with pytest.raises(ConfigError, match="VLLM_RAY_PER_WORKER_GPUS must be a number above 0 and at most 1; got '2'"):
        ray_gpus.reserve_gpus(on_gpus(2))


def call_on_half_a_gpu(call, *args):
    """Call in a Ray task on half a GPU, whose placement group has another half."""
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    group = placement_group([{"GPU": 0.5, "CPU": 0.5, "node:127.0.0.2": 0.001}] * 2)
    assert group.wait(PATIENCE), "no earlier test keeps GPUs"
    first = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0)
    options = {"num_cpus": 0, "num_gpus": 0.5, "scheduling_strategy": first}
    paths = {"env_vars": {"PYTHONPATH": os.pathsep.join(sys.path)}}
    try:
        return ray.get(ray.remote(call).options(**options, runtime_env=paths).remote(*args), timeout=PATIENCE)
    finally:
        remove_placement_group(group)


def reserve_both_halves():
    from dataclasses import replace

    from test_ray import VISIBLE, on_gpus

    from quire.engine.executor import ray_gpus

    ray_gpus.reserve_gpus(replace(on_gpus(2), device="auto"))  # a GPU of the actor decides
    found = ray_gpus.take_reservation()
    try:
        ray_gpus.reserve_gpus(on_gpus(3, engine_start_timeout=0.5))
    except EngineError as error:
        return list(found.shares), found.variables, os.environ[VISIBLE], str(error)
    finally:
        found.release()


def test_engines_get_the_settings_of_the_server_but_not_its_secrets():
    settings = {"QUIRE_FAKE_LATENCY": "1", "VLLM_BATCH_INVARIANT": "1", "OMP_NUM_THREADS": "2"}
    others = {"QUIRE_API_KEY": "a", "VLLM_API_KEY": "b", "QUIRE_RAY_BUNDLES": "0", "PATH": "/bin"}
    assert passed_on(settings | others) == settings


@pytest.mark.usefixtures("cluster")
def test_two_ranks_have_half_a_gpu_each():
    shares, variables, visible, error = call_on_half_a_gpu(reserve_both_halves)
    assert (shares, variables, visible) == ([range(2)], [{VISIBLE: "0", SHARE: "1"}], "0")
    assert "ranks need 0.5 GPUs each; 0 of 2 are reserved, and the placement group has no more that are free" in error


def test_an_agent_shows_its_ranks_the_gpus_of_its_node(monkeypatch):
    seen = []
    monkeypatch.setenv(VISIBLE, "3")
    monkeypatch.setattr(ray_nodes.nodes, "run_node", lambda *args: seen.append((os.environ[VISIBLE], args[:3])) or True)
    monkeypatch.setattr(ray_nodes, "own_terms", lambda args: {})
    assert ray_nodes._Agent().run(("127.0.0.2", 1), 1, "127.0.0.3", "key", on_gpus(2), {VISIBLE: "1,2"})
    assert seen == [("1,2", (("127.0.0.2", 1), 1, "127.0.0.3"))]


CUDA = {"device": "cuda", "dtype": "float32", "kv_cache_memory_bytes": 64 << 20, "skip_tokenizer_init": True}


def generate_on_gpu(directory, **more):
    llm = LLM(directory, **CUDA, **more)
    found = [list(output.outputs[0].token_ids) for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]
    llm.llm_engine.shutdown()
    return found


@pytest.mark.gpu
@pytest.mark.usefixtures("cluster")
def test_two_ranks_on_one_card(tiny_model):
    assert call_on_half_a_gpu(generate_on_two, str(tiny_model)) == generate_on_gpu(str(tiny_model))


def generate_on_two(directory):
    from test_ray import ON_RAY, generate_on_gpu

    return generate_on_gpu(directory, **ON_RAY)
