"""How two runs of one checkpoint differ: tokens, and the log-probabilities where tokens differ.

Greedy decoding of random weights meets near-ties, and any other summation order decides some of
them the other way. So tokens are compared up to the first difference, and that difference must be a
near-tie in both runs: the other run's token among the candidates, within `NEAR` of the best.
Numbers are compared where both runs saw the same input: the log-probabilities of the prompt's own
tokens. How far two correct kernels may differ there is what the host's own two paths show.
"""

from __future__ import annotations

NEAR = 0.1


def compare(ours: list[dict], stock: list[dict]) -> dict:
    """Compare two runs' answers (see `questions.tidy`), prompt by prompt."""
    rows, worst = [], 0.0
    prompts = zip(ours, stock, strict=True)
    apart = [abs(p - q) for a, b in prompts for p, q in zip(a["prompt"], b["prompt"], strict=True)]
    for index, (a, b) in enumerate(zip(ours, stock, strict=True)):
        same = next(
            (i for i, (s, t) in enumerate(zip(a["tokens"], b["tokens"], strict=True)) if s != t),
            len(a["tokens"]),
        )
        for step in range(same):
            worst = max(worst, abs(a["logprobs"][step] - b["logprobs"][step]))
        row = {"prompt": index, "equal_tokens": same, "tokens": len(a["tokens"])}
        if same < len(a["tokens"]):
            row |= {
                "ours": _gap(a, same, b["tokens"][same]),
                "stock": _gap(b, same, a["tokens"][same]),
            }
        rows.append(row)
    return {
        "prompts": len(rows),
        "equal": sum(row["equal_tokens"] == row["tokens"] for row in rows),
        "worst_logprob_difference": worst,
        "prompt_positions": len(apart),
        "prompt_mean_difference": sum(apart) / len(apart),
        "prompt_worst_difference": max(apart),
        "differences": [row for row in rows if "ours" in row],
    }


def _gap(answer: dict, step: int, other_token: int) -> dict:
    """Return how far the other run's token was from this run's choice, in log-probability."""
    candidates = {token: logprob for logprob, token in answer["top"][step]}
    best, other = answer["logprobs"][step], candidates.get(other_token)
    return {
        "token": answer["tokens"][step],
        "logprob": best,
        "other_token_logprob": other,
        "gap": None if other is None else best - other,
    }


def near_ties_only(result: dict) -> bool:
    """True where every first difference is a near-tie in both runs."""
    gaps = [row[side]["gap"] for row in result["differences"] for side in ("ours", "stock")]
    return all(gap is not None and gap <= NEAR for gap in gaps)
