"""What a layer is to the ranks that share a model's matrices."""

from enum import Enum


class Role(Enum):
    """`prepare/shard.py` does what it says. A merged layer has its role in each of its parts."""

    REPLICATED = "every rank has all of it"
    COLUMN = "a rank has some outputs"
    ROW = "a rank has some inputs, and what it makes of them is added to what the others do"
    VOCABULARY = "a rank has some tokens"
    EXPERT = "a rank has some experts, or a part of each"
