"""GPU memory of collectives, estimated for `quire plan`. An engine measures it: ranks connect before memory is measured.

NCCL has buffers for each connection, which is a channel between two ranks. A sum is an all-to-all, with connections to all
other ranks, and an all-gather in a ring, with connections to its neighbours. Sizes and numbers follow
the source in github.com/NVIDIA/nccl:

    src/init.cc             buffers of three protocols: 512 KiB, 4,800 KiB and 4 MiB (`NCCL_BUFFSIZE`)
    src/transport/p2p.cc    the sender's and the receiver's part are rounded up to 2 MiB each: 12 MiB together
    src/graph/paths.cc      channels to each rank of an all-to-all: two per NVLink, rounded up to a power of two; two on PCIe

Logs in github.com/NVIDIA/nccl/issues show 16 channels to each rank with NVLink (892), and 2 between nodes (1189).
"""

CONNECTION_BYTES = 12 << 20
NVLINK_CHANNELS = 32  # of a ring, and to each rank of a node; assumed as the most
OTHER_CHANNELS = 2
ONE_SHOT_BYTES = 2 << 20  # `one_shot.py`


def collective_bytes(ranks: int, nodes: int, link: str | None) -> int:
    """Return the bytes on each GPU, rather too many than too few.

    link: between GPUs of a node (`sim/links.py`); None: unknown.
    """
    if ranks == 1:
        return 0
    ring = OTHER_CHANNELS if link is not None and link.startswith("pcie") else NVLINK_CHANNELS
    to_each = ring if nodes == 1 else OTHER_CHANNELS
    own = ONE_SHOT_BYTES if nodes == 1 else 0
    return ((ranks - 1) * to_each + ring) * CONNECTION_BYTES + own
