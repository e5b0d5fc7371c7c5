"""Expert parallelism on FSDP2: four processes compute what one does with all their batches."""

from __future__ import annotations

import importlib.util
import time
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason="tests of fusco.fsdp need transformers: pip install 'transformers>=5.9'")

import fsdp_error_jobs as error_jobs
import fsdp_jobs as jobs
import fsdp_transformers_jobs as transformers_jobs
from fsdp_models import SEQUENCE, make_model
from fsdp_runs import LIMIT_S, Run
from launching import launch

from fusco import StaticRows
from fusco.fsdp import TorchDispatcher

pytestmark = pytest.mark.multirank

ROOT = Path(__file__).parents[2]
RTOL = 5e-6  # of the largest gradient of a parameter; measured: up to 1.1e-6
NORM_RTOL = 1e-6  # of loss and gradient norms; measured: up to 5.3e-7
# There, too, the reference is one process on the CPU. A GPU adds in another order and computes exponentials
# differently; on an H200 all differences are within this.
SLACK_ON_CUDA = 10
EITHER_DISPATCHER = pytest.mark.parametrize(("ep_size", "dispatcher"), [(2, "torch"), (4, "fusco")])


def assert_small(differences, device="cpu"):
    slack = SLACK_ON_CUDA if device == "cuda" else 1
    wrong = {
        name: difference
        for name, difference in differences.items()
        if not difference < slack * (NORM_RTOL if name == "loss" or name.startswith("norm ") else RTOL)
    }
    assert not wrong


def assert_that_of_one_process(world, job=jobs.differences_of_gradients, **of_run):
    for differences in world.run(job, Run(**of_run)):
        assert_small(differences, world.device)


# Each size of groups with either dispatcher and either dimension, and these with each other: not all three with all.
@pytest.mark.parametrize(
    ("ep_size", "expert_dim", "dispatcher"),
    [(1, 0, "fusco"), (1, 1, "torch"), (2, 0, "torch"), (2, 1, "fusco"), (4, 0, "fusco"), (4, 1, "torch")],
)
def test_gradients_are_those_of_one_process(four, ep_size, expert_dim, dispatcher):
    run = Run(ep_size=ep_size, expert_dim=expert_dim, dispatcher=dispatcher)
    for differences in four.run(jobs.differences_of_gradients, run):
        assert any("mlp.gate.weight" in name for name in differences)
        assert_small(differences, four.device)


@pytest.mark.cpu_only
def test_the_divide_factor_of_fsdp_would_be_seen(four):
    """Its experts' gradients are ``ep_size`` times too large: off by ``ep_size - 1``."""
    for differences in four.run(jobs.differences_of_gradients, Run(ep_size=4, divides=True)):
        for name, wrong in differences.items():
            if ".experts." in name:
                assert wrong == pytest.approx(3, rel=1e-4)
            elif not name.startswith("norm "):
                assert wrong < RTOL


@pytest.mark.cpu_only
def test_a_dropped_token_would_be_seen(four):
    for differences in four.run(jobs.differences_of_gradients, Run(dispatcher="drops a token")):
        assert min(wrong for name, wrong in differences.items() if name != "norm inf") > 10 * RTOL


@pytest.mark.cpu_only
@pytest.mark.parametrize(("ep_size", "dispatcher"), [(1, "torch"), (2, "fusco")])
def test_three_clipped_steps_of_adamw(four, ep_size, dispatcher):
    run = Run(ep_size=ep_size, dispatcher=dispatcher)
    for differences in four.run(jobs.differences_of_training, run, 3):
        assert all(difference < 1e-4 for difference in differences.values()), differences


@EITHER_DISPATCHER
def test_ranks_without_labels(four, ep_size, dispatcher):
    assert_that_of_one_process(four, ep_size=ep_size, nums_sequences=(0, 2, 0, 0), dispatcher=dispatcher)


@EITHER_DISPATCHER
@pytest.mark.parametrize("nums_tokens", [(5, 0, 3, 8), (0, 0, 0, 2), (0, 0, 0, 0)])
def test_ranks_without_tokens(four, nums_tokens, ep_size, dispatcher):
    for differences in four.run(jobs.differences_of_a_block, Run(ep_size=ep_size, dispatcher=dispatcher), nums_tokens):
        assert_small(differences, four.device)


@EITHER_DISPATCHER
def test_ranks_whose_experts_get_no_tokens(four, ep_size, dispatcher):
    assert_that_of_one_process(four, ep_size=ep_size, is_starved=True, dispatcher=dispatcher, expert_dim=ep_size // 4)


@pytest.mark.parametrize("kind", ["mixtral", "deepseek-v3", "gpt-oss"])
def test_other_architectures(four, kind):
    assert_that_of_one_process(four, kind=kind)


@pytest.mark.parametrize("kind", ["qwen3", "mixtral", "deepseek-v3", "gpt-oss"])
def test_a_plan_for_every_batch_changes_no_gradient(four, kind):
    ways = {"qwen3": (2, 1, "full"), "mixtral": (2, 0, "none"), "deepseek-v3": (2, 1, "selective")}
    ep_size, expert_dim, recomputes = ways.get(kind, (4, 1, "selective"))
    run = Run(kind=kind, ep_size=ep_size, expert_dim=expert_dim, recomputes=recomputes, spare_places=2)
    results = four.run(jobs.differences_with_balance, run)
    assert sum(num_copies for _, num_copies in results) > 0
    for differences, _ in results:
        assert_small(differences, four.device)


def test_ranks_without_tokens_or_rows_have_copies_too(four):
    assert_that_of_one_process(four, is_starved=True, spare_places=1, ep_size=4)
    assert_that_of_one_process(four, nums_sequences=(0, 2, 0, 0), spare_places=2)


@pytest.mark.cpu_only
def test_a_balance_needs_a_dispatcher_that_copies(four):
    for raised in four.run(error_jobs.error_of, Run(dispatcher="torch", spare_places=1), {}):
        assert raised == "balance needs a FuscoDispatcher, which can copy experts, not TorchDispatcher"


@pytest.mark.parametrize(("dp_replicate", "ep_size", "expert_dim"), [(2, 1, 0), (2, 2, 1), (4, 1, 1)])
def test_replicas(four, dp_replicate, ep_size, expert_dim):
    assert_that_of_one_process(four, ep_size=ep_size, dp_replicate=dp_replicate, expert_dim=expert_dim)


@pytest.mark.parametrize("recomputes", ["full", "selective", "by transformers"])
def test_activation_checkpointing(four, recomputes):
    dispatcher = "torch" if recomputes == "selective" else "fusco"
    assert_that_of_one_process(four, kind="deepseek-v3", recomputes=recomputes, dispatcher=dispatcher)


@pytest.mark.cpu_only
def test_under_mixed_precision_narrow_rows_travel_and_weights_stay_exact(four):
    for seen in four.run(jobs.dtypes_under_mixed_precision):
        assert seen == {"x": "torch.bfloat16", "weights": "torch.float32", "y": "torch.bfloat16"}


@pytest.mark.cpu_only
def test_only_the_outputs_of_the_model_are_cast(four):
    for differences in four.run(jobs.differences_with_an_output_dtype, Run()):
        assert max(differences.values()) == 0


@pytest.mark.cpu_only
def test_the_next_block_and_its_experts_are_prefetched(four):
    forward, backward = four.run(jobs.prefetched)[0]
    first, second = ["layers.0", "layers.0.mlp.experts"], ["layers.1", "layers.1.mlp.experts"]
    assert forward == {"": first, "layers.0": second}
    assert backward == {"": second, "layers.1": first}


@EITHER_DISPATCHER
def test_narrow_gradients_are_those_of_one_process_with_wide_ones(four, ep_size, dispatcher):
    """Up to the rounding of bfloat16, with frozen routing; parameters and reduced gradients are float32."""
    for differences in four.run(jobs.differences_under_mixed_precision, Run(ep_size=ep_size, dispatcher=dispatcher)):
        assert any(".experts." in name for name in differences)
        assert differences.pop("loss") < 2e-3  # measured: 7.2e-4
        assert max(differences.values()) < 0.06  # measured: 0.032


def test_gradient_accumulation(four):
    assert_that_of_one_process(four, jobs.differences_of_accumulation)


@pytest.mark.cpu_only
@pytest.mark.parametrize(
    ("run", "changes", "text"),
    [
        (
            Run(ep_size=4),
            {"num_experts": 6},
            "model.layers.0.mlp.experts.gate_up_proj of shape (6, 16, 16): ep_size=4 does not divide its 6 experts",
        ),
        (
            Run(ep_size=1),
            {"moe_intermediate_size": 3},
            "model.layers.0.mlp.experts.gate_up_proj of shape (8, 6, 16): the 4 ranks that share an expert do not "
            "divide dimension 1; choose another ep_size, or Sharding(expert_dim=0)",
        ),
        (Run(ep_size=1, expert_dim=0), {"moe_intermediate_size": 3}, "none"),
    ],
)
def test_what_cannot_be_sharded_is_named(four, run, changes, text):
    assert four.run(error_jobs.error_of, run, changes) == [text] * 4


@pytest.mark.cpu_only
def test_an_unknown_checkpointing_mode(four):
    for text in four.run(error_jobs.error_of, Run(recomputes="all"), {}):
        assert text == "activation_checkpointing must be one of ('none', 'full', 'selective'), got 'all'"


@pytest.mark.cpu_only
def test_a_model_without_experts(four):
    for text in four.run(error_jobs.error_of, Run(), {"decoder_sparse_step": 5}):
        assert text.startswith("Qwen3MoeForCausalLM has no module of experts")


@pytest.mark.cpu_only
def test_tokens_of_a_wrong_shape_on_one_rank_are_rejected_on_all(two):
    for rank, errors in enumerate(two.run(error_jobs.errors_of_one_rank)):
        text = "x and topk_idx need two dimensions, got [4] and [3, 1]"
        for error, verb in zip(errors, ("Communicator", "dispatch"), strict=True):
            rejected = f"RejectedInputError: {verb} was cancelled on all ranks, since rank 1 rejected its input: {text}"
            assert error == (f"ValueError: {text}" if rank else rejected)


@pytest.mark.cpu_only
def test_rows_of_another_size_on_one_rank_are_an_error_on_all(two):
    begin = time.monotonic()
    pairs = [(8, torch.float32), (4, torch.bfloat16), (8, torch.bfloat16)]
    first, *others, same_bytes, one, other, last = two.run(error_jobs.errors_of_other_rows_on_one_rank, pairs)[0]
    assert time.monotonic() - begin < LIMIT_S / 2
    wide, narrow = (f"Communicator(num_experts=2, num_topk=1, max_bytes_per_token={n})" for n in (32, 8))
    assert one == f"ranks call different collectives: {wide} on rank 0, {narrow} on rank 1"
    assert other == f"ranks call different collectives: {narrow} on rank 0, {wide} on rank 1"
    assert last == f"ranks call different collectives: {narrow} on rank 0, dispatch on rank 1"
    assert first == "ranks disagree in Communicator: max_bytes_per_token is 16 on rank 0, 32 on rank 1"
    assert others == [
        "ranks call different collectives: dispatch on rank 0, "
        f"Communicator(num_experts=2, num_topk=1, max_bytes_per_token={num_bytes}) on rank 1"
        for num_bytes in (32, 8)
    ]
    assert same_bytes.startswith("ranks disagree in dispatch: ")


@pytest.mark.cpu_only
def test_sums_may_travel_wider_than_rows(two):
    two.run(error_jobs.check_wide_sums_of_narrow_rows)


@pytest.mark.cpu_only
def test_weights_that_differ_between_ranks(four):
    for text in four.run(error_jobs.error_of, Run(), {}, seed_by_rank=True):
        assert text.startswith("parameter model.layers.1.mlp.gate.weight differs between ranks (1 of ")


@pytest.mark.cpu_only
def test_what_cannot_be_parallelized_is_rejected_on_all_ranks_before_anything_changes(four):
    for rank, errors in enumerate(four.run(error_jobs.errors_of_misuse)):
        ours, theirs = ([0, 1], [2, 3])[rank // 2], ([0, 2], [1, 3])[rank % 2]
        wrong_group = f"the dispatcher is of ranks {theirs}, but experts are distributed among ranks {ours}"
        assert errors["another group"] == wrong_group
        rejected = "rank 1 failed with "
        of_rank_1 = "the dispatcher is of ranks [1, 3], but experts are distributed among ranks [0, 1]"
        assert errors["another group on rank 1"] == (of_rank_1 if rank == 1 else f"{rejected}ValueError: {of_rank_1}")
        assert errors["another formula on rank 1"].startswith(
            "model.layers.1.mlp.experts (Qwen3MoeExperts) computes something else than fusco" if rank == 1 else rejected
        )
        assert errors["values on rank 0"].startswith(
            "parameter model.embed_tokens.weight has values on some ranks and is on the meta device on others"
        )
        assert errors["twice"].startswith("parameter model.embed_tokens.weight is already distributed")
        assert errors["no forward"].startswith("FSDP cannot shard a ModuleDict, which has no forward")
        assert ("no attribute 'group'" if rank == 1 else rejected) in errors["no dispatcher on rank 1"]
        assert errors["two dtypes"].startswith(
            "model.layers.1.self_attn.q_proj.weight is torch.float32 and model.layers"
        )


@pytest.mark.cpu_only
def test_experts_are_sharded_a_layer_at_a_time(four):
    """A device never has the experts of all layers at once, not even those of its "ep" rank."""
    for seen in four.run(jobs.bytes_while_sharding, Run()):
        assert seen["peak"] == seen["layer"]
        assert seen["left"] == seen["layer"] // 2


@pytest.mark.cpu_only
def test_meshes_that_do_not_fit(four):
    assert (
        four.run(error_jobs.error_of_mesh, 3, 1)
        == ["ep_size=3 times dp_replicate=1 does not divide the 4 ranks of the default process group"] * 4
    )
    assert four.run(error_jobs.error_of_mesh, 0, 1) == ["ep_size must be positive, got 0"] * 4


@pytest.mark.cpu_only
def test_more_tokens_than_the_dispatcher_was_made_for(four):
    for text in four.run(error_jobs.error_of_too_many_tokens):
        assert "max_tokens_per_rank=1" in text


@pytest.mark.cpu_only
@pytest.mark.parametrize(
    "options",
    [{"static": StaticRows(4 * 3 * SEQUENCE * 4)}, {"dispatcher": TorchDispatcher}],
    ids=["static rows", "torch"],
)
def test_experts_implementations_with_static_rows_or_another_dispatcher(four, options):
    for differences in four.run(transformers_jobs.differences_through_experts_functions, "qwen3", 4, **options):
        assert_small(differences)


@pytest.mark.cpu_only
@pytest.mark.skipif(
    importlib.util.find_spec("accelerate") is None, reason="transformers distributes models with accelerate only"
)
@pytest.mark.parametrize(("ep_size", "tp_size"), [(2, 1), (4, 2)])
def test_models_that_transformers_distributes(four, tmp_path, ep_size, tp_size):
    make_model("qwen3").save_pretrained(tmp_path)
    for differences in four.run(transformers_jobs.differences_through_transformers, tmp_path, ep_size, tp_size):
        assert_small(differences)


@pytest.mark.cpu_only
def test_models_that_call_fusco_by_the_name_of_an_experts_implementation(four):
    for differences in four.run(transformers_jobs.differences_through_experts_functions, "mixtral", 4):
        assert_small(differences)


@pytest.mark.cpu_only
@pytest.mark.skipif(
    importlib.util.find_spec("accelerate") is None, reason="transformers distributes models with accelerate only"
)
def test_transformers_cannot_distribute_experts_of_another_formula(four, tmp_path):
    make_model("qwen3").save_pretrained(tmp_path)
    for text in four.run(transformers_jobs.error_of_another_formula_through_transformers, tmp_path):
        assert text.startswith("Qwen3MoeExperts computes something else than fusco")


@pytest.mark.cpu_only
def test_experts_of_another_formula_cannot_call_fusco_by_name(two):
    for text in two.run(transformers_jobs.error_of_another_formula_by_name):
        assert text.startswith("Qwen3MoeExperts computes something else than fusco")


@pytest.mark.cpu_only
def test_models_that_call_fusco_by_name_are_not_kept_alive(two):
    two.run(transformers_jobs.check_that_models_go)


@pytest.mark.cpu_only
def test_experts_that_are_not_distributed(four):
    for text in four.run(error_jobs.error_of_undistributed_experts):
        assert text == (
            "MixtralExperts has 8 experts and this rank has 8 of them, but 2 ranks share them: distribute its "
            "parameters on dimension 0 first"
        )


@pytest.mark.cpu_only
def test_the_example_learns(tmp_path):
    """A whole program, by torchrun's agent."""
    run = launch(2, str(ROOT / "examples" / "train_moe.py"), [], tmp_path)
    assert run.is_ok, run.stderr
    losses = [float(line.split()[3]) for line in run.stdout.splitlines() if line.startswith("step")]
    assert len(losses) == 20
    assert losses[-1] < losses[0] / 2


@pytest.mark.cpu_only
@pytest.mark.parametrize(("dp_replicate", "ep_size", "dispatcher"), [(2, 2, "fusco"), (2, 4, "torch")])
def test_eight_ranks(eight, dp_replicate, ep_size, dispatcher):
    sequences = (1, 2, 1, 0, 1, 1, 3, 1)
    run = {"ep_size": ep_size, "dp_replicate": dp_replicate, "dispatcher": dispatcher}
    assert_that_of_one_process(eight, nums_sequences=sequences, **run)
