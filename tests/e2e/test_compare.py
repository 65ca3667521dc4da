"""The comparison itself must fail where kernels are wrong. Needs no GPU."""

from __future__ import annotations

import copy

from tests.e2e import compare

STOCK = [
    {
        "prompt": [-5.0, -5.5, -6.0],
        "tokens": [7, 8, 9],
        "logprobs": [-5.0, -5.1, -5.2],
        "top": [[[-5.0, 7], [-5.05, 3]], [[-5.1, 8], [-5.9, 4]], [[-5.2, 9], [-5.3, 5]]],
    }
]


def run(**changes) -> list[dict]:
    return [copy.deepcopy(STOCK[0]) | changes]


def test_equal_runs_are_equal():
    result = compare.compare(run(), STOCK)
    assert (result["equal"], result["differences"]) == (1, [])
    assert result["prompt_worst_difference"] == 0


def test_a_near_tie_passes_and_ends_the_comparison():
    top = [[[-5.01, 3], [-5.02, 7]], [[-1.0, 1]], [[-1.0, 1]]]
    result = compare.compare(run(tokens=[3, 1, 1], logprobs=[-5.01, -1.0, -1.0], top=top), STOCK)
    assert result["differences"][0]["equal_tokens"] == 0
    assert result["worst_logprob_difference"] == 0
    assert compare.near_ties_only(result)


def test_another_token_that_was_no_near_tie_fails():
    top = [STOCK[0]["top"][0], [[-5.0, 4], [-5.05, 8]], STOCK[0]["top"][2]]
    result = compare.compare(run(tokens=[7, 4, 9], top=top), STOCK)
    assert not compare.near_ties_only(result)


def test_a_token_outside_the_candidates_fails():
    result = compare.compare(run(tokens=[1, 8, 9]), STOCK)
    assert not compare.near_ties_only(result)


def test_numbers_are_compared_on_the_prompt():
    result = compare.compare(run(prompt=[-5.0, -5.5, -6.3]), STOCK)
    assert abs(result["prompt_worst_difference"] - 0.3) < 1e-9
    assert abs(result["prompt_mean_difference"] - 0.1) < 1e-9
