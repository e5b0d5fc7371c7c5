"""Families of node-to-node matrices, to test schedules."""

from __future__ import annotations

import numpy as np


def _equal_sums(weights):
    """Scale the weights until all row and column sums are nearly equal: no node is idle at any time."""
    weights = weights.astype(float)
    for _ in range(200):
        weights /= np.maximum(weights.sum(axis=1, keepdims=True), 1e-30)
        weights /= np.maximum(weights.sum(axis=0, keepdims=True), 1e-30)
    return (weights * 10_000_000).astype(np.int64)


def _permutations(num_nodes, sizes, random):
    matrix = np.zeros((num_nodes, num_nodes), np.int64)
    for size in sizes:
        matrix[np.arange(num_nodes), random.permutation(num_nodes)] += size
    return matrix


def _geometric_then_even(num_nodes, random):
    """A few large permutations and many small ones: hard for any fixed quantum."""
    huge = _permutations(num_nodes, [int(1e7 * 0.8**i) + 1 for i in range(2 * num_nodes)], random)
    return huge + random.integers(0, 1000, (num_nodes, num_nodes))


def families(num_nodes: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Return one int64 matrix (num_nodes, num_nodes) of each family, zero on the diagonal."""
    random = np.random.default_rng([num_nodes, seed])
    shape = (num_nodes, num_nodes)
    ranks = 1 + random.permutation(num_nodes**2).reshape(shape)
    off_diagonal = 1 - np.eye(num_nodes, dtype=np.int64)
    one_sender, one_receiver = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    one_sender[0] = random.integers(1, 1000, num_nodes)
    one_receiver[:, -1] = random.integers(1, 1000, num_nodes)
    uniform = random.integers(1, 100_001, shape)
    found = {
        "zeros": np.zeros(shape, np.int64),
        "equal": np.full(shape, 4096),
        "uniform": uniform,
        "uniform, equal sums": _equal_sums(uniform * off_diagonal),
        "sparse": uniform * (random.random(shape) < 0.25),
        "zipf 0.3": (1e6 * ranks**-0.3).astype(np.int64),
        "zipf 0.9": (1e6 * ranks**-0.9).astype(np.int64) + 1,
        "zipf 0.8, equal sums": _equal_sums(ranks**-0.8 * off_diagonal),
        "exponential, equal sums": _equal_sums(random.exponential(1, shape) * off_diagonal),
        "powers of two, equal sums": _equal_sums(2.0 ** random.integers(0, 12, shape) * off_diagonal),
        "as many permutations as can be": _permutations(
            num_nodes, random.integers(1, 1000, (num_nodes - 1) ** 2 + 1), random
        ),
        "geometric permutations": _geometric_then_even(num_nodes, random),
        "one sender": one_sender,
        "one receiver": one_receiver,
        "one sender and one receiver over little": uniform // 1000 + 1_000_000 * (one_sender + one_receiver),
        "tiny": random.integers(0, 3, shape),
        "very large": random.integers(0, 2**62 // num_nodes, shape),
    }
    return {name: matrix.astype(np.int64) * off_diagonal for name, matrix in found.items()}
