"""Chunked log-probabilities: the naive numbers and gradients, never the naive tensor.

Letters in shape suffixes: `N` tokens, `D` hidden size, `V` vocabulary.
"""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.core.errors import UserError
from thinwire.rl.logprobs import CHUNK_LOGIT_BYTES, default_chunk_tokens, logprobs_and_entropy


def problem(tokens, hidden, vocabulary, dtype, seed=0, bias=True):
    """Hidden states, a head with weights, targets; logits spread over several nats."""
    generator = torch.Generator().manual_seed(seed)
    hidden_ND = (3 * torch.randn(tokens, hidden, generator=generator)).to(dtype).requires_grad_()
    head = torch.nn.Linear(hidden, vocabulary, bias=bias)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return hidden_ND, head.to(dtype), torch.randint(vocabulary, (tokens,), generator=generator)


def naive(hidden_ND, head, target_N, temperature):
    """The definition on the whole logits, in float64 or the logits' own wider type."""
    logits_NV = head(hidden_ND).double() / temperature
    logsumexp_N = logits_NV.logsumexp(-1)
    logprob_N = logits_NV.gather(-1, target_N[:, None])[:, 0] - logsumexp_N
    return logprob_N, logsumexp_N - (logits_NV.softmax(-1) * logits_NV).sum(-1)


def gradients(outputs, hidden_ND, head, seed=7):
    """Gradients of a fixed random weighting of log-probabilities and entropies, in all inputs."""
    generator = torch.Generator().manual_seed(seed)
    weights = torch.randn(2, outputs[0].shape[0], generator=generator, dtype=torch.float64)
    loss = (weights[0] * outputs[0]).sum() + (weights[1] * outputs[1]).sum()
    return torch.autograd.grad(loss, [hidden_ND, *head.parameters()])


@settings(max_examples=40, deadline=None)
@given(
    tokens=st.integers(0, 13),
    chunk=st.integers(1, 15),
    temperature=st.sampled_from([1.0, 0.7, 2.5]),
    seed=st.integers(0, 2**31),
)
def test_values_and_gradients_equal_the_definition_in_float64(tokens, chunk, temperature, seed):
    """Logits stay below 200 nats and sums have 11 terms, gradients 13 more: 1e-11 is some 200 roundings."""
    hidden_ND, head, target_N = problem(tokens, 5, 11, torch.float64, seed)
    outputs = logprobs_and_entropy(hidden_ND, head, target_N, temperature, chunk)
    expected = naive(hidden_ND, head, target_N, temperature)
    for found_N, expected_N in zip(outputs, expected, strict=True):
        torch.testing.assert_close(found_N, expected_N, rtol=0, atol=1e-11)
    found = gradients(outputs, hidden_ND, head)
    for one, other in zip(found, gradients(expected, hidden_ND, head), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)


def test_gradients_pass_a_finite_difference_check_through_recomputed_chunks():
    hidden_ND, head, target_N = problem(5, 3, 4, torch.float64)

    def function(hidden, weight):
        return logprobs_and_entropy(hidden, lambda x: x @ weight.T, target_N, chunk_tokens=2)

    weight_VD = head.weight.detach().clone().requires_grad_()
    assert torch.autograd.gradcheck(function, (hidden_ND, weight_VD))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_are_float32_and_right_to_float32_rounding_of_the_logits(dtype):
    """Below 64 nats a logit is exact to 64 x 2^-24 = 4e-6; a row sum of 50 terms adds a few of those.

    The head's own product is left in `dtype` on both sides: what is checked starts at its logits.
    """
    hidden_ND, head, target_N = problem(40, 8, 50, dtype)
    outputs = logprobs_and_entropy(hidden_ND, head, target_N, chunk_tokens=40)
    for found_N, expected_N in zip(outputs, naive(hidden_ND, head, target_N, 1.0), strict=True):
        assert found_N.dtype == torch.float32
        torch.testing.assert_close(found_N.double(), expected_N, rtol=0, atol=2e-5)
    torch.stack(outputs).sum().backward()
    assert hidden_ND.grad.dtype == head.weight.grad.dtype == dtype


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_passes_with_and_without_gradients_give_the_same_bits(dtype):
    """What makes the ratio exactly 1 at the first update."""
    hidden_ND, head, target_N = problem(23, 8, 50, dtype)
    for chunk in (4, 100):
        with torch.no_grad():
            plain = logprobs_and_entropy(hidden_ND, head, target_N, 0.9, chunk)
        trained = logprobs_and_entropy(hidden_ND, head, target_N, 0.9, chunk)
        assert trained[0].requires_grad
        assert not plain[0].requires_grad
        for one, other in zip(plain, trained, strict=True):
            assert torch.equal(one, other.detach())


def test_no_call_of_the_head_sees_more_than_a_chunk_forward_or_backward():
    """23 tokens in chunks of 4 are 6 calls, and 6 more when backward makes the logits again."""
    hidden_ND, head, target_N = problem(23, 8, 50, torch.float32)
    rows = []
    head.register_forward_hook(lambda module, inputs, output: rows.append(output.shape[0]))
    logprob_N, _ = logprobs_and_entropy(hidden_ND, head, target_N, chunk_tokens=4)
    assert rows == [4, 4, 4, 4, 4, 3]
    logprob_N.sum().backward()
    assert sorted(rows) == [3, 3, *[4] * 10]


def test_only_the_inputs_of_a_chunk_are_kept_for_backward():
    """Every tensor autograd saves between forward and backward, by size: none has chunk x V elements."""
    hidden_ND, head, target_N = problem(24, 2, 500, torch.float32, bias=False)
    sizes = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.numel()) or t, lambda t: t):
        logprobs_and_entropy(hidden_ND, head, target_N, chunk_tokens=4)
        assert max(sizes, default=0) < 4 * 500
        logprobs_and_entropy(hidden_ND, head, target_N, chunk_tokens=24)
    assert max(sizes) >= 24 * 500  # the plain path does keep them: the check can fail


def test_entropy_is_empty_when_not_asked_for_and_the_logprob_is_the_same():
    hidden_ND, head, target_N = problem(9, 8, 50, torch.float32)
    for chunk in (2, 100):
        both = logprobs_and_entropy(hidden_ND, head, target_N, chunk_tokens=chunk)
        one = logprobs_and_entropy(hidden_ND, head, target_N, chunk_tokens=chunk, with_entropy=False)
        assert one[1].shape == (0,)
        assert torch.equal(one[0], both[0])


def test_no_tokens_give_empty_results_and_zero_gradients():
    hidden_ND, head, target_N = problem(0, 8, 50, torch.float32)
    logprob_N, entropy_N = logprobs_and_entropy(hidden_ND, head, target_N)
    assert logprob_N.shape == entropy_N.shape == (0,)
    (logprob_N.sum() + entropy_N.sum()).backward()
    assert (head.weight.grad == 0).all()


def test_the_default_chunk_fills_its_budget_and_is_at_least_one_token():
    for vocabulary, expected in ((151_936, 110), (20, CHUNK_LOGIT_BYTES // 80), (10**9, 1)):
        hidden_ND = torch.zeros(3, 1)
        head = lambda x, v=vocabulary: x.expand(-1, v)  # noqa: E731
        assert default_chunk_tokens(hidden_ND, head) == expected


def test_a_uniform_head_has_the_entropy_of_its_vocabulary():
    """log 50 at any temperature; float32 rounding of about 4 nats is 2.4e-7, taken 4 times."""
    for temperature, chunk in itertools.product((0.5, 1.0), (2, 9)):
        outputs = logprobs_and_entropy(
            torch.ones(5, 2), lambda x: x.new_zeros(x.shape[0], 50), torch.arange(5), temperature, chunk
        )
        expected_N = torch.full((5,), 50.0).log()
        torch.testing.assert_close(outputs[0], -expected_N, rtol=0, atol=1e-6)
        torch.testing.assert_close(outputs[1], expected_N, rtol=0, atol=1e-6)


@pytest.mark.parametrize(("field", "value"), [("temperature", 0.0), ("logprob_chunk_tokens", 0)])
def test_a_value_out_of_range_names_its_field(field, value):
    hidden_ND, head, target_N = problem(3, 2, 4, torch.float32)
    with pytest.raises(UserError, match=rf"\.{field} must be .* got {value}"):
        logprobs_and_entropy(hidden_ND, head, target_N, **{field.removeprefix("logprob_"): value})
