"""Values that a training job rejects before any process is started."""

import pytest

from fusco.bench.train.job import TrainingJob, byte_model

SHAPE = {"num_layers": 2, "hidden": 64, "num_experts": 8, "num_topk": 2, "moe_intermediate": 16}
JOB = {"tokens": 32, "length": 16, "learning_rate": 1e-3, "dtype": "float32"}


def make_job(**changes):
    shape = byte_model(**{**SHAPE, **{name: changes.pop(name) for name in SHAPE if name in changes}})
    return TrainingJob(shape=shape, **{**JOB, **changes})


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"ep_size": 3}, "ep_size=3 does not divide the 4 ranks"),
        (
            {"spare_places": 2, "dispatchers": ("torch",)},
            "--balance goes with --dispatcher fusco alone, and without --forced-balance",
        ),
        ({"ep_size": 4, "num_experts": 6}, "ep_size=4 does not divide the 6 experts of a layer"),
        ({"num_topk": 9}, "num_topk is 9, more than the 8 experts"),
        ({"hidden": 48}, "hidden must be a multiple of 32, got 48"),
        ({"num_layers": 0}, "num_layers must be positive, got 0"),
        ({"length": 10}, "sequences of length 10 do not divide the 32 tokens of a rank"),
        ({"learning_rate": 0.0}, "learning_rate must be positive and finite, got 0.0"),
        ({"router_loss": -1.0}, "router_loss must be finite and not negative, got -1.0"),
        ({"warmup_steps": -2}, "warmup_steps must be finite and not negative, got -2"),
        ({"router_loss": float("inf")}, "router_loss must be finite and not negative, got inf"),
        (
            {"ep_size": 1, "moe_intermediate": 17},
            "the 4 ranks that share an expert (4 ranks, ep_size=1) cannot shard it evenly with moe_intermediate=17",
        ),
    ],
)
def test_what_does_not_go_together_is_named(changes, text):
    with pytest.raises(ValueError) as error:  # noqa: PT011  the whole text is compared
        make_job(**changes)
    assert str(error.value) == text


@pytest.mark.parametrize(
    ("hidden", "head_dim", "num_heads", "num_kv"), [(32, 32, 1, 1), (96, 32, 3, 3), (2048, 128, 16, 8)]
)
def test_attention_heads_fit_the_width(hidden, head_dim, num_heads, num_kv):
    shape = byte_model(**{**SHAPE, "hidden": hidden})
    assert (shape.head_dim, shape.num_heads, shape.num_key_value_heads) == (head_dim, num_heads, num_kv)


def test_a_step_looks_at_one_byte_more_than_tokens_for_each_sequence():
    assert make_job().num_sequences == 2
    assert make_job().bytes_per_step == 4 * 2 * 17
